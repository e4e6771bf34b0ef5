"""Training on any grid equals training in one process."""

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from impl.target import target
from invariants.case import Case, Model, OptimizerSpec, Step, Topology
from invariants.strategies import cases

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]
STEPS = (Step(1), Step(2), Step(1))


def windows(case):
    """Random windows for `case`; every second batch has a microbatch in which no token counts."""
    import torch

    from invariants.target import GlobalBatch

    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch_size, case.model.sequence)
    for size in case.windows:
        window = []
        for index in range(size):
            tokens, targets = torch.randint(case.model.vocabulary, (2, *shape), generator=generator)
            mask = torch.ones(shape)
            if case.mask != "full":
                mask = (torch.rand(shape, generator=generator) > 0.4).float()
            if case.mask == "holes" and index % 2 == 0:
                mask[: case.microbatch_size] = 0
            window.append(GlobalBatch(tokens, targets, mask))
        yield window


def errors(context, case):
    """Largest error against the single process, of losses, gradients as reduced, and parameters; and what was held."""
    import torch

    from invariants.target import Kind

    trainer, reference = target.build(case, context), target.reference(case, context)
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    covered = set()

    def whole(kind):
        return {piece.name: piece.tensor for piece in reference.held(kind)}

    for window in windows(case):
        pieces = []

        def observe(_moment, pieces=pieces):
            pieces += [(piece, piece.tensor.clone()) for piece in trainer.held(Kind.GRADIENT)]

        loss = trainer.step(window, observe).loss
        worst["loss"] = max(worst["loss"], abs(loss - reference.step(window, lambda _moment: None).loss))
        gradients, parameters = whole(Kind.GRADIENT), whole(Kind.PARAMETER)
        for piece, tensor in pieces:
            start, stop = piece.flat_range
            covered.add((piece.name, start, stop))
            difference = (tensor - gradients[piece.name].flatten()[start:stop]).abs().max()
            worst["gradient"] = max(worst["gradient"], float(difference))
        for piece in trainer.held(Kind.PARAMETER):
            difference = (piece.tensor - parameters[piece.name]).abs().max()
            worst["parameter"] = max(worst["parameter"], float(difference))
    assert trainer.steps_done() == len(case.windows)
    sizes = {name: tensor.numel() for name, tensor in gradients.items()}
    bits = {piece.name: piece.tensor.numpy().tobytes() for piece in trainer.held(Kind.PARAMETER)}
    assert torch.get_default_dtype() is torch.float32
    return worst, covered, sizes, bits


def judge(worlds, case, tolerance):
    results = worlds(case.topology.world_size).run(errors, case)
    covered = {}
    bits = {}
    for worst, pieces, _, held in results:
        assert max(worst["loss"], worst["gradient"]) < tolerance, (str(case), worst)
        # Adam divides by the size of the gradient, and so takes rounding for a direction where the gradient is 0.
        assert worst["parameter"] < 1e5 * tolerance, (str(case), worst)
        for name, start, stop in pieces:
            covered.setdefault(name, set()).update(range(start, stop))
        for name, value in held.items():
            assert bits.setdefault(name, value) == value, f"{case}: {name} differs between ranks"
    sizes = results[0][2]
    assert {name: len(elements) for name, elements in covered.items()} == sizes, "gradient shards do not cover"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "dp"), GRIDS)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_equals_single_process_in_float64(worlds, schedule, pp, dp, microbatches):
    case = Case(
        topology=Topology.of(pp=pp, dp=dp),
        schedule=schedule,
        microbatches=microbatches,
        model=Model(tied=microbatches == 4),
        precision="float64",
        mask="holes",
        history=STEPS,
        seed=pp * 10 + dp,
    )
    judge(worlds, case, 1e-13)


@given(cases(optimizers=("adam", "adamw", "sgd"), precisions=("float64",), max_world=3), st.integers(0, 99))
@example(Case(topology=Topology.of(pp=3, dp=1), microbatches=2, schedule="1f1b", precision="float64"), 0)
@example(
    Case(
        topology=Topology.of(pp=2, dp=1),
        model=Model(layers=1, tied=True),
        frozen=(0,),
        split=(1, 2),
        precision="float64",
    ),
    0,
)
@example(Case(topology=Topology.of(pp=3, dp=1), frozen=(0, 1), split=(1, 1, 2), precision="float64"), 0)
@settings(max_examples=25, deadline=None)
def test_equals_single_process_on_drawn_cases(worlds, case, seed):
    judge(worlds, replace(case, history=STEPS, seed=seed), 1e-10)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_float32_is_as_close_as_float32_can_be(worlds, kind):
    case = Case(
        topology=Topology.of(pp=2, dp=2),
        schedule="1f1b",
        microbatches=3,
        model=Model(tied=True),
        optimizer=OptimizerSpec(kind, lr=1e-3, weight_decay=0.1 if kind == "adamw" else 0.0),
        mask="uneven",
        history=STEPS,
    )
    judge(worlds, case, 1e-6)


def test_nothing_counts(worlds):
    """A window without a token that counts has loss 0, gradients 0, and divides by 1."""

    def step(context, case):
        from dataclasses import replace

        from invariants.target import Kind

        trainer = target.build(case, context)
        window = [replace(batch, mask=batch.mask * 0) for batch in next(windows(case))]
        largest = []
        loss = trainer.step(
            window, lambda _: largest.extend(float(g.tensor.abs().max()) for g in trainer.held(Kind.GRADIENT))
        ).loss
        return loss, max(largest)

    case = Case(topology=Topology.of(pp=2, dp=1), microbatches=2, history=(Step(),))
    assert worlds(2).run(step, case) == [(0.0, 0.0)] * 2


def test_grid_of_one_has_the_bits_of_a_plain_loop(worlds):
    def differing(context, case):
        from invariants.target import Kind

        trainer, reference = target.build(case, context), target.reference(case, context)
        for window in windows(case):
            trainer.step(window, lambda _moment: None)
            reference.step(window, lambda _moment: None)
            theirs = {piece.name: piece.tensor for piece in reference.held(Kind.GRADIENT)}
        return [
            piece.name for piece in trainer.held(Kind.GRADIENT) if not piece.tensor.equal(theirs[piece.name].flatten())
        ]

    case = Case(schedule="1f1b", microbatches=3, mask="uneven", history=(Step(2),))
    assert worlds(1).run(differing, case) == [[]]


@pytest.mark.parametrize(
    ("schedule", "fault", "most", "after"),
    [
        ("gpipe", None, [5, 5, 5], 0),
        ("1f1b", None, [3, 2, 1], 0),
        ("1f1b", "graphs-kept-in-step", [5, 5, 5], 0),
        ("1f1b", "graphs-kept-over-steps", [15, 15, 15], 15),
    ],
)
def test_graphs_in_flight(worlds, schedule, fault, most, after):
    """Microbatches whose saved tensors are alive: M for GPipe, min(M, N - s) for 1F1B, none between steps."""

    def peak(context, case, fault):
        with target.faults()[fault].patch() if fault else contextlib.nullcontext():
            return measure(context, case)

    def measure(context, case):
        import weakref

        import torch

        trainer = target.build(case, context)
        ((_, stage),) = trainer.stages()
        alive, peaks = [], []

        class Saved:
            def __init__(self, tensor):
                self.tensor = tensor

        def forward(tensors):
            held = weakref.WeakSet()

            def pack(tensor):
                saved = Saved(tensor.detach())  # else the graph holds what it saved, and that the graph
                held.add(saved)
                return saved

            alive.append(held)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
                result = original(tensors)
            peaks.append(sum(bool(held) for held in alive))
            return result

        original, stage.forward = stage.forward, forward
        for window in windows(case):
            trainer.step(window, lambda _moment: None)
        return max(peaks), sum(bool(held) for held in alive)

    case = Case(topology=Topology.of(pp=3, dp=1), schedule=schedule, microbatches=5, history=(Step(2), Step(1)))
    assert worlds(3).run(peak, case, fault) == [(held, after) for held in most]


def test_a_stage_that_changes_its_shape_is_named(worlds):
    """gloo would fill the peer's buffer in part, without an error."""

    def step(context, case):
        trainer = target.build(case, context)
        if context.rank == 1:
            return "not reached"
        ((_, stage),) = trainer.stages()
        original = stage.forward
        stage.forward = lambda x: original(x)[:, :-1]
        try:
            trainer.step(next(windows(case)), lambda _moment: None)
        except RuntimeError as error:
            return str(error)
        return "no error"

    case = Case(topology=Topology.of(pp=2, dp=1))
    message = worlds(2).run(step, case)[0]
    assert message == ("0SEND_F0: has (1, 3, 8) torch.float32 to send, the peer receives (1, 4, 8) torch.float32")


def test_global_random_state_is_left_alone(worlds):
    def draw(context, case):
        import torch

        torch.manual_seed(7)
        random.seed(7)
        trainer = target.build(case, context)
        trainer.step(next(windows(case)), lambda _moment: None)
        first = torch.rand(()), random.random()
        torch.manual_seed(7)
        random.seed(7)
        return (torch.rand(()), random.random()) == first

    assert worlds(2).run(draw, Case(topology=Topology.of(pp=1, dp=2))) == [True, True]
