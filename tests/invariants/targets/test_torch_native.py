"""The torch target on real ranks: against the reference, against what is really posted, and over a checkpoint."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from invariants.case import Case
from invariants.errors import UsageError
from invariants.schedule.actions import parse_cell
from invariants.target import MISSING, GlobalBatch, HasFaults, HasReference, Kind, Moment, Pipelines, Saves
from invariants.targets.torch_native import target
from invariants.world.pool import RankFailed

AGREES = {"rtol": 0.0, "atol": 1e-9}
"""float64: right code sits at 1e-12 and below, wrong code at 1e-3 and above."""


def window(case: Case, step: int) -> list[GlobalBatch]:
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    shape, vocabulary = (case.batch_size, case.model.sequence), case.model.vocabulary
    batches = []
    for _ in range(case.windows[step]):
        tokens, targets = (torch.randint(vocabulary, shape, generator=generator) for _ in range(2))
        mask = (torch.rand(shape, generator=generator) < (1.0 if case.mask == "full" else 0.6)).int()
        if case.mask == "holes":
            mask[0] = 0
        batches.append(GlobalBatch(tokens, targets, mask))
    return batches


def values(trainer, kind: Kind) -> dict:
    return {
        (held.name, held.state_key, held.role): None if held.tensor is MISSING else held.tensor.clone()
        for held in trainer.held(kind)
    }


def run(trainer, case: Case, steps: range) -> list:
    """Loss, gradients as reduced and parameters of each step."""
    record = []
    for step in steps:
        moments, gradients = [], {}

        def observe(moment, moments=moments, gradients=gradients):
            moments.append(moment)
            gradients.update(values(trainer, Kind.GRADIENT))

        result = trainer.step(window(case, step), observe)
        assert moments == [Moment.REDUCED]
        record.append((result.loss, gradients, values(trainer, Kind.PARAMETER)))
    return record


def train(context, case: Case, fault: str | None = None) -> list:
    with nullcontext() if fault is None else target.faults()[fault].patch():
        return run(target.build(case, context), case, range(len(case.windows)))


def train_plainly(context, case: Case) -> list:
    return run(target.reference(case, context), case, range(len(case.windows)))


def difference(worlds, case: Case, fault: str | None = None) -> dict[str, float]:
    """Largest difference from the reference over ranks and steps: of losses, gradients, parameters."""
    (expected,) = worlds(1).run(train_plainly, case)
    ranks = worlds(case.topology.world_size).run(train, case, fault)
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    names = set()
    for record in ranks:
        for (loss, gradients, parameters), (the_loss, the_gradients, the_parameters) in zip(
            record, expected, strict=True
        ):
            names |= set(parameters)
            if loss is not None:
                worst["loss"] = max(worst["loss"], abs(loss - the_loss))
            for kind, ours, theirs in (
                ("gradient", gradients, the_gradients),
                ("parameter", parameters, the_parameters),
            ):
                for key, value in ours.items():
                    assert (value is None) == (theirs[key] is None), f"{kind} of {key[0]} is missing on one side only"
                    if value is not None:
                        worst[kind] = max(worst[kind], (value - theirs[key]).abs().max().item())
    assert names == set(expected[0][2])
    assert any(loss is not None for loss, _, _ in ranks[-1])
    return worst


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("grid", ["pp1.dp1", "pp2.dp1", "pp1.dp2", "pp2.dp2", "pp3.dp1"])
def test_three_steps_equal_the_reference(worlds, grid, schedule):
    case = Case.parse(f"topology={grid},schedule={schedule},m=3,precision=float64,mask=uneven,history=1.2.1")
    assert max(difference(worlds, case).values()) < AGREES["atol"]


@pytest.mark.parametrize(
    "text",
    [
        "topology=pp2.dp1,m=1",
        "topology=pp2.dp2,m=5,mb=2,schedule=1f1b,optimizer=adamw,decay=0.1,split=1+3",
        "topology=pp2.dp2,m=2,mask=holes,frozen=0+1,split=2+2",
        "topology=pp2.dp2,m=2,frozen=2+3,split=2+2,schedule=1f1b",
        "topology=pp3.dp1,m=3,frozen=1,split=1+1+2,schedule=1f1b",
        "topology=pp1.dp3,m=2,sequence=1,vocabulary=2,mask=holes,optimizer=sgd",
    ],
)
def test_awkward_corners_equal_the_reference(worlds, text):
    assert max(difference(worlds, Case.parse(f"precision=float64,history=1.2.1,{text}")).values()) < AGREES["atol"]


@settings(max_examples=12)
@given(case=target.cases().map(lambda case: replace(case, options=())))
def test_drawn_cases_equal_the_reference_or_are_refused(worlds, case):
    case = replace(case, precision="float64")
    if case.schedule == "1f1b" and case.microbatches < case.topology.size("pp"):
        with pytest.raises(RankFailed, match="Refused: Schedule1F1B"):
            worlds(case.topology.world_size).run(train, case)
    else:
        assert max(difference(worlds, case).values()) < AGREES["atol"]


def test_too_few_microbatches_are_refused_in_torchs_words(worlds):
    with pytest.raises(RankFailed, match=r"Refused: Schedule1F1B: Number of microbatches \(1\) must be greater than"):
        worlds(2).run(train, Case.parse("topology=pp2.dp1,schedule=1f1b,m=1"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tied=yes", "tied=yes"),
        ("schedule=zigzag", "zigzag"),
        ("split=1+1", r"split=1\+1"),
        ("width=3", "width=3"),
        ("x.shapes=guessed", "x.shapes=guessed"),
        ("frozen=4", "frozen=4: expected indices from 0 to 3"),
        ("frozen=0+1+2+3", "not all"),
    ],
)
def test_cases_outside_the_domain_get_one_line(text, said):
    with pytest.raises(UsageError, match=said):
        target.build(Case.parse(text), mock.Mock(rank=0, device=torch.device("cpu")))


def test_the_reference_starts_from_the_same_values_and_takes_others():
    alone = mock.Mock(rank=0, device=torch.device("cpu"))
    case = Case.parse("topology=pp2.dp2,m=2,history=1,seed=5,frozen=1")
    single, double = target.reference(case, alone), target.reference(case.single(), alone)
    for ours, exact in zip(single.held(Kind.PARAMETER), double.held(Kind.PARAMETER), strict=True):
        assert (ours.name, ours.trainable) == (exact.name, exact.trainable)
        assert torch.equal(ours.tensor.double(), exact.tensor)
        exact.tensor.copy_(torch.zeros_like(exact.tensor))
    result = double.step(window(case, 0), lambda _: None)
    assert result.loss == pytest.approx(math.log(case.model.vocabulary))


def test_torch_cannot_infer_shapes_under_ddp_between_two_backwards(worlds):
    """A finding: with shapes left to `PipelineStage`, DDP rebuilds its buckets from two reductions and fails."""
    with pytest.raises(RankFailed, match="rebuilt parameter indices size is not same"):
        worlds(2).run(train, Case.parse("topology=pp2.dp1,m=2,x.shapes=inferred"))
    case = Case.parse("topology=pp2.dp2,m=3,schedule=1f1b,x.shapes=inferred,precision=float64,mask=uneven")
    assert max(difference(worlds, case).values()) < AGREES["atol"]


# -- what is really posted ---------------------------------------------------------------------------------------


@contextmanager
def recording(stage: int, row: list):
    """Note every post and computation as a cell of a schedule; the k-th of a kind is microbatch k."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.pipelining import PipelineStage

    counts: dict[str, int] = {}
    lists = [row]

    def note(op: str) -> None:
        counts[op] = counts.get(op, -1) + 1
        lists[-1].append(f"{stage}{op}{counts[op]}")

    def posting(kind: str, original):
        def post(tensor, *args, **kwargs):
            # Not the integers by which stages agree on how they learn shapes, before the first step.
            if tensor.is_floating_point():
                peer = kwargs["group_dst" if kind == "SEND" else "group_src"]
                note(f"{kind}_{'F' if (kind == 'SEND') == (peer > stage) else 'B'}")
            return original(tensor, *args, **kwargs)

        return post

    def batching(original):
        def batch(posts):
            lists.append([])
            works = original(posts)
            row.append(f"({';'.join(lists.pop())})BATCH")
            return works

        return batch

    def computing(op: str, original):
        def compute(*args, **kwargs):
            note(op)
            return original(*args, **kwargs)

        return compute

    isend, irecv = posting("SEND", c10d.isend), posting("RECV", c10d.irecv)
    with ExitStack() as patches:
        # Where torch looks them up: the schedules in `torch.distributed`, `P2POp` in its own module.
        for module in (dist, c10d):
            patches.enter_context(mock.patch.multiple(module, isend=isend, irecv=irecv))
        patches.enter_context(mock.patch.object(dist, "batch_isend_irecv", batching(dist.batch_isend_irecv)))
        for op, name in (("F", "forward_one_chunk"), ("B", "backward_one_chunk")):
            patches.enter_context(mock.patch.object(PipelineStage, name, computing(op, getattr(PipelineStage, name))))
        yield


def rows_of_two_steps(context, case: Case) -> tuple[list, list, list]:
    trainer = target.build(case, context)
    assert isinstance(trainer, Pipelines)
    ((stage, module),) = trainer.stages()
    rows, calls = ([], []), []
    module.register_forward_hook(lambda *_: calls.append(stage))
    for step, row in enumerate(rows):
        with recording(stage, row):
            trainer.step(window(case, step), lambda _: None)
    assert calls == [stage] * (2 * case.microbatches)
    return (list(trainer.schedule()), *rows)


@pytest.mark.parametrize(
    "text",
    [
        "topology=pp1.dp1,schedule=1f1b,m=2",
        "topology=pp2.dp1,schedule=gpipe,m=1",
        "topology=pp2.dp1,schedule=1f1b,m=2",
        "topology=pp3.dp1,schedule=gpipe,m=2",
        "topology=pp3.dp1,schedule=1f1b,m=5",
        "topology=pp3.dp1,schedule=1f1b,m=3,split=1+1+2,frozen=0",
        "topology=pp3.dp1,schedule=gpipe,m=2,split=1+1+2,frozen=0+1",
    ],
)
def test_the_row_is_what_torch_posts(worlds, text):
    case = Case.parse(f"{text},history=1.1")
    for stage, (said, first, second) in enumerate(worlds(case.topology.world_size).run(rows_of_two_steps, case)):
        assert first == second == said, f"stage {stage}"
        assert [str(parse_cell(cell)) for cell in said] == said


# -- checkpoints -------------------------------------------------------------------------------------------------


def state(trainer) -> dict:
    return {
        "parameters": values(trainer, Kind.PARAMETER),
        "optimizer": values(trainer, Kind.OPTIMIZER),
        "rng": torch.get_rng_state(),
        "steps": trainer.steps_done(),
    }


def save_and_go_on(context, case: Case, folder) -> tuple[dict, dict]:
    trainer = target.build(case, context)
    assert isinstance(trainer, Saves)
    torch.manual_seed(context.rank)
    torch.rand(3)
    run(trainer, case, range(case.save_after))
    trainer.save(folder)
    saved = state(trainer)
    run(trainer, case, range(case.save_after, len(case.windows)))
    return saved, state(trainer)


def load_and_go_on(context, case: Case, folder, fault: str | None = None) -> tuple[dict, dict]:
    with nullcontext() if fault is None else target.faults()[fault].patch():
        trainer = target.build(case, context)
        trainer.load(folder)
        loaded = state(trainer)
        run(trainer, case, range(case.save_after, len(case.windows)))
        return loaded, state(trainer)


@pytest.mark.parametrize(
    "text",
    [
        "topology=pp2.dp2,frozen=0",
        "topology=pp1.dp3,optimizer=adamw,decay=0.1",
        "topology=pp2.dp1,split=2+2,frozen=0+1",
    ],
)
def test_a_fresh_world_loads_what_was_saved_and_goes_on_alike(worlds, tmp_path, text):
    case = Case.parse(f"m=2,mask=uneven,precision=float64,history=1.2.save.1.1,{text}")
    size = case.topology.world_size
    before = worlds(size).run(save_and_go_on, case, tmp_path)
    with_fresh = worlds.fresh(size)
    after = with_fresh.run(load_and_go_on, case, tmp_path)
    with_fresh.close()
    owned = 0
    for (saved, went), (loaded, resumed) in zip(before, after, strict=True):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
        torch.testing.assert_close(resumed, went, **AGREES)
        assert loaded["steps"] == 2
        owned += len(loaded["optimizer"])
    assert owned > 0


# -- planted faults ----------------------------------------------------------------------------------------------

FAULTY = "topology=pp2.dp2,m=3,schedule=1f1b,precision=float64,mask=uneven,history=1.2.1.save.1"


@pytest.mark.parametrize(
    ("name", "shows_in"), [("bare-module", "gradient"), ("scaled-twice", "gradient"), ("stale-shards", "parameter")]
)
def test_a_planted_fault_shows(worlds, name, shows_in):
    case = Case.parse(FAULTY)
    assert target.faults()[name].applies(case)
    assert difference(worlds, case, name)[shows_in] > 1e-3


@pytest.mark.parametrize("name", [name for name, fault in target.faults().items() if fault.harmless])
def test_a_harmless_variant_does_not(worlds, name):
    case = Case.parse(FAULTY)
    assert target.faults()[name].applies(case)
    assert max(difference(worlds, case, name).values()) < AGREES["atol"]


def peak_with(context, case: Case, fault: str) -> int:
    with target.faults()[fault].patch():
        held = [1 if "F" in cell else -1 for cell in target.build(case, context).schedule() if "_" not in cell]
    return max(sum(held[:end]) for end in range(len(held) + 1))


def test_an_eager_warmup_holds_every_microbatch(worlds):
    case = Case.parse(FAULTY)
    assert target.faults()["eager-warmup"].applies(case)
    assert worlds(4).run(peak_with, case, "eager-warmup") == [3, 3, 3, 3]
    assert max(difference(worlds, case, "eager-warmup").values()) < AGREES["atol"]


def test_lost_moments_show_after_a_load(worlds, tmp_path):
    case = Case.parse(FAULTY)
    assert target.faults()["moments-lost"].applies(case)
    before = worlds(4).run(save_and_go_on, case, tmp_path)
    after = worlds(4).run(load_and_go_on, case, tmp_path, "moments-lost")
    for (saved, _), (loaded, _) in zip(before, after, strict=True):
        torch.testing.assert_close(loaded["parameters"], saved["parameters"], rtol=0, atol=0)
        assert saved["optimizer"]
        assert not loaded["optimizer"]


# -- the controller ----------------------------------------------------------------------------------------------


def test_the_controller_reads_the_target_without_torch():
    code = (
        "import sys; from invariants.targets.torch_native import target; target.cases(); target.faults();"
        "assert 'torch' not in sys.modules; print(target.name, target.promises.layout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "torch whole-parameter\n"), done.stderr
    assert isinstance(target, HasFaults)
    assert isinstance(target, HasReference)
