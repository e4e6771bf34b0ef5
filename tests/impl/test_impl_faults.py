"""Each planted fault changes what can be observed, where it says that it applies; no harmless variant does."""

import re
from dataclasses import replace

import pytest

from impl.faults import FAULTS
from impl.target import target
from invariants.case import Case, Model, Save, Step, Topology
from invariants.errors import Refused
from invariants.target import Counts, HasFaults, HasReference, Kind, Pipelines, Saves

CASE = Case(
    topology=Topology.of(pp=2, dp=2),
    schedule="1f1b",
    microbatches=3,
    model=Model(tied=True),
    precision="float64",
    mask="uneven",
    history=(Step(2), Step(1), Save(), Step(1), Step(2)),
    seed=3,
)
SEEN_ELSEWHERE = {"graphs-kept-in-step", "graphs-kept-over-steps", "split-by-parameters", "stages-by-number-of-layers"}
SEEN_ELSEWHERE |= {"received-into-longer-buffer", "received-into-integers", "activations-sent-again"}
SEEN_ELSEWHERE |= {"send-buffer-overwritten"}
SEEN_ELSEWHERE |= {"all-reduce-then-slice", "reduced-at-every-microbatch", "sent-in-double"}


def observe(context, case, folder, name, mode):
    """What a rank shows under fault `name`: rows, losses, gradients, shards, parameters, and the same after a load."""
    import contextlib

    import torch

    from invariants.target import GlobalBatch

    def values(pieces):
        return [(piece.name, piece.role, piece.flat_range, piece.tensor.clone()) for piece in pieces]

    generator = torch.Generator().manual_seed(5)
    shape = (case.batch_size, case.model.sequence)

    def window(size):
        for _ in range(size):
            tokens, targets = torch.randint(case.model.vocabulary, (2, *shape), generator=generator)
            yield GlobalBatch(tokens, targets, (torch.rand(shape, generator=generator) > 0.4).float())

    windows = [list(window(size)) for size in case.windows]
    with target.faults()[name].patch() if name else contextlib.nullcontext():
        trainer = target.build(case, context)
        torch.manual_seed(context.rank + 50 * (mode == "load"))
        shown = {"row": trainer.schedule(), "start": values(trainer.held(Kind.PARAMETER))}
        gradients = []
        if mode == "load":
            trainer.load(folder)
        for index, batches in enumerate(windows[trainer.steps_done() :]):
            result = trainer.step(batches, lambda _: gradients.extend(values(trainer.held(Kind.GRADIENT))))
            shown[f"loss{index}"] = result.loss
            torch.rand(1)
            if mode == "save" and trainer.steps_done() == case.save_after:
                trainer.save(folder)
        shown |= {"gradients": gradients, "steps": trainer.steps_done(), "random": float(torch.rand(1))}
        for kind in (Kind.PARAMETER, Kind.OPTIMIZER):
            shown[kind.value] = values(trainer.held(kind))
    return shown


def differing(one, other, tolerance):
    """What two observations of one rank show differently."""
    return {key for key in one if not _same(one[key], other.get(key), tolerance)}


def _same(one, other, tolerance):
    import torch

    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(_same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=tolerance)
    return one == pytest.approx(other, abs=tolerance) if isinstance(one, float) else one == other


@pytest.fixture(scope="module")
def clean(worlds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    saved = worlds(4).run(observe, CASE, folder, None, "save")
    return saved, worlds(4).run(observe, CASE, folder, None, "load")


@pytest.mark.parametrize("name", sorted(set(FAULTS) - SEEN_ELSEWHERE))
def test_shows_or_stays_hidden(worlds, clean, tmp_path, name):
    fault = FAULTS[name]
    case = CASE if fault.applies(CASE) else replace(CASE, topology=Topology.of(pp=2, dp=1))
    assert fault.applies(case)
    size = case.topology.world_size
    expected = (
        clean if size == 4 else [worlds(size).run(observe, case, tmp_path, None, mode) for mode in ("save", "load")]
    )
    differences = set()
    for mode, shown in zip(("save", "load"), expected, strict=True):
        found = worlds(size).run(observe, case, tmp_path, name, mode)
        differences |= set().union(*(differing(a, b, 1e-7) for a, b in zip(shown, found, strict=True)))
        if differences and not fault.harmless:
            return
    assert fault.harmless, "it changes nothing that is observed"
    layout = {"row", "gradients", "optimizer", "start", "parameter"} if name in LAYOUT else set()
    assert differences <= layout


LAYOUT = {"exchanges-in-pairs", "even-ranks-send-first", "parameters-in-reverse-order"}
"""Variants that put things elsewhere: to other ranks, other places of a buffer, or another order of messages."""


def test_every_fault_names_a_public_report_and_every_variant_a_reason():
    for name, fault in FAULTS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert fault.report.startswith("https://github.com/") is not fault.harmless
    assert sum(fault.harmless for fault in FAULTS.values()) >= 8


def test_patches_are_taken_back():
    from impl import pipeline, schedule, zero1

    def patchable():
        return (schedule.LOWERING, schedule.generate, zero1.FlatGroup.__init__, pipeline.Execution.backward)

    before, during = patchable(), set()
    for fault in FAULTS.values():
        with fault.patch():
            during |= set(zip(range(4), patchable(), strict=True))
        assert patchable() == before
    assert {place for place, value in during if value != before[place]} == {0, 1, 2, 3}


def test_offers_what_the_protocols_ask_for(worlds):
    def offers(context):
        trainer = target.build(Case(), context)
        return [isinstance(trainer, protocol) for protocol in (Saves, Counts, Pipelines)]

    assert worlds(1).run(offers) == [[True] * 3]
    assert isinstance(target, HasFaults)
    assert isinstance(target, HasReference)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(topology=Topology.of(tp=2)), "topology tp2: expected the axes pp and dp, in this order"),
        (Case(topology=Topology.of(dp=2, pp=2)), "in this order"),
        (Case(topology=Topology.of(pp=9)), "pp=9: expected at most 4"),
        (Case(schedule="zigzag"), "schedule=zigzag"),
        (Case(frozen=(0, 1, 2, 3)), "not all"),
    ],
)
def test_declines_what_it_cannot_do(case, message):
    with pytest.raises(Refused, match=message):
        target.build(case, None)


@pytest.mark.parametrize("kind", [Kind.MASTER, Kind.BUFFER])
def test_holds_neither_masters_nor_buffers(worlds, kind):
    assert worlds(1).run(lambda context, kind: len(list(target.build(Case(), context).held(kind))), kind) == [0]
