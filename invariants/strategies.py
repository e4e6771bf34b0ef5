"""Hypothesis strategies for cases: awkward corners are likely, and examples shrink towards the smallest world."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from invariants.case import Case, Mask, Model, Operation, OptimizerKind, OptimizerSpec, Precision, Save, Step, Topology

MASKS: tuple[Mask, ...] = ("full", "uneven", "holes")


def topologies(*, max_world: int = 4, max_pp: int = 4, max_dp: int = 4) -> st.SearchStrategy[Topology]:
    """Grids of `pp` x `dp` with at most `max_world` ranks, smallest first."""
    grids = [(pp, dp) for pp in range(1, max_pp + 1) for dp in range(1, max_dp + 1) if pp * dp <= max_world]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid))
    return st.sampled_from([Topology.of(pp=pp, dp=dp) for pp, dp in grids])


@st.composite
def splits(draw: st.DrawFn, layers: int, stages: int) -> tuple[int, ...] | None:
    """Layer counts of `stages` contiguous stages, each 1 or more, summing to `layers`; or None: the target decides."""
    if draw(st.booleans()):
        return None
    between = st.integers(1, layers - 1)
    cuts = sorted(draw(st.sets(between, min_size=stages - 1, max_size=stages - 1))) if stages > 1 else []
    edges = [0, *cuts, layers]
    return tuple(right - left for left, right in itertools.pairwise(edges))


@st.composite
def models(draw: st.DrawFn, stages: int, ties: Sequence[bool]) -> Model:
    """Small models with at least `stages` layers, embedding and head counted; sizes that do not divide are common."""
    width, heads = draw(st.sampled_from([(4, 1), (4, 2), (6, 3), (8, 2)]))
    return Model(
        layers=draw(st.integers(max(1, stages - 2), max(3, stages))),
        width=width,
        heads=heads,
        vocabulary=draw(st.integers(2, 11)),
        sequence=draw(st.integers(1, 5)),
        tied=draw(st.sampled_from(list(ties))),
    )


@st.composite
def histories(draw: st.DrawFn, max_window: int = 2) -> tuple[Operation, ...]:
    """One or two steps, a save, and two or three steps; a window holds 1 to `max_window` batches."""
    steps = st.builds(Step, st.integers(1, max_window))
    before = draw(st.lists(steps, min_size=1, max_size=2))
    after = draw(st.lists(steps, min_size=2, max_size=3))
    return (*before, Save(), *after)


@st.composite
def _frozen(draw: st.DrawFn, layers: int, split: tuple[int, ...] | None) -> tuple[int, ...]:
    """No layer, one layer, or the whole first stage, but never all layers."""
    how = draw(st.sampled_from(["none", "none", "none", "one", "stage"]))
    if how == "one":
        return (draw(st.integers(0, layers - 1)),)
    if how == "stage" and split is not None and len(split) > 1:
        return tuple(range(split[0]))
    return ()


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    schedules: Sequence[str] = ("gpipe", "1f1b"),
    max_world: int = 4,
    max_pp: int = 4,
    max_dp: int = 4,
    precisions: Sequence[Precision] = ("float64", "float32"),
    optimizers: Sequence[OptimizerKind] = ("adam",),
    masks: Sequence[Mask] = MASKS,
    ties: Sequence[bool] = (False, True),
    frozen: bool = True,
    max_window: int = 2,
) -> Case:
    """Cases of `pp` x `dp` training of the small GPT.

    Sequences list what a target knows, simplest first. One microbatch, fewer microbatches than stages and a number
    that is no multiple of them are as likely as the plain ones.
    """
    topology = draw(topologies(max_world=max_world, max_pp=max_pp, max_dp=max_dp))
    stages = topology.size("pp")
    model = draw(models(stages, ties))
    split = draw(splits(model.layers + 2, stages))
    kind = draw(st.sampled_from(list(optimizers)))
    return Case(
        topology=topology,
        schedule=draw(st.sampled_from(list(schedules))),
        microbatches=draw(st.integers(1, 2 * stages + 1)),
        microbatch_size=draw(st.integers(1, 2)),
        model=model,
        split=split,
        precision=draw(st.sampled_from(list(precisions))),
        optimizer=OptimizerSpec(kind, weight_decay=draw(st.sampled_from([0.0, 0.1])) if kind != "adam" else 0.0),
        mask=draw(st.sampled_from(list(masks))),
        frozen=draw(_frozen(model.layers + 2, split)) if frozen else (),
        history=draw(histories(max_window)),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def data_parallel_cases(
    draw: st.DrawFn,
    *,
    max_world: int = 4,
    batch_sizes: Sequence[int] = (1, 2, 3),
    precisions: Sequence[Precision] = ("float64", "float32"),
    optimizers: Sequence[OptimizerKind] = ("adam",),
    masks: Sequence[Mask] = ("full",),
    decays: Sequence[float] = (0.0,),
    max_window: int = 2,
) -> Case:
    """Cases of training with replicas and no pipeline, for targets with a model and, by `Feeds`, data of their own.

    Each replica's share of a batch has one of `batch_sizes` samples. Where tokens are masked, give `masks`: an error in
    what a loss is divided by shows only there.
    """
    return Case(
        topology=Topology.of(dp=draw(st.integers(1, max_world))),
        schedule="none",
        microbatch_size=draw(st.sampled_from(list(batch_sizes))),
        precision=draw(st.sampled_from(list(precisions))),
        optimizer=OptimizerSpec(
            draw(st.sampled_from(list(optimizers))), weight_decay=draw(st.sampled_from(list(decays)))
        ),
        mask=draw(st.sampled_from(list(masks))),
        history=draw(histories(max_window)),
        seed=draw(st.integers(0, 999)),
    )
