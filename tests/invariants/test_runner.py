"""A case becomes evidence; what goes wrong on ranks is in it, named, and the next case finds clean worlds."""

import contextlib
import os
from dataclasses import replace

import pytest

from impl.target import target as impl_target
from invariants import MISSING, Case, Fault, Held, Kind, Moment, Promises, Refused, StepResult, Topology, UsageError
from invariants.catalog import BUILT_IN
from invariants.runner import Runner
from invariants.strategies import data_parallel_cases

CASE = Case.parse("topology=dp2,schedule=none,precision=float64,optimizer=sgd,history=1.2.save.1.1")
PIPELINE = Case.parse("topology=pp2.dp2,schedule=1f1b,m=3,mask=uneven,precision=float64,history=1.2.save.1.1")


class Linear:
    """One weight, trained on x * y pairs by hand: the sum over all samples of w * x, so that the gradient is sum x."""

    def __init__(self, rank, case, behaviour):
        import torch

        self.rank, self.case, self.behaviour, self.steps = rank, case, behaviour, 0
        self.weight = torch.ones(3, dtype=getattr(torch, case.precision))
        self.gradient = torch.zeros_like(self.weight)
        if behaviour.get("saves", True):
            self.save, self.load = self._save, self._load

    def step(self, window, observe):
        import torch
        import torch.distributed as dist

        self.behaviour.get("step", lambda *_: None)(self.rank, self.steps)
        share = self.case.microbatch_size * (1 if self.behaviour.get("forgets") else self.case.microbatches)
        mine = slice(self.rank.rank * share, (self.rank.rank + 1) * share)
        total = sum(batch.tokens[mine].to(self.weight.dtype).sum() for batch in window)
        self.gradient = torch.full_like(self.weight, float(total))
        dist.all_reduce(self.gradient)
        loss = float(self.gradient @ self.weight)
        if self.behaviour.get("observes", True):
            observe(Moment.REDUCED)
        skipped = self.behaviour.get("skips", False)
        if not skipped:
            self.weight -= self.case.optimizer.lr * self.gradient
        self.steps += 1
        return StepResult(loss, skipped=skipped)

    def held(self, kind):
        if kind is Kind.PARAMETER:
            yield Held("w", self.weight, (3,))
        elif kind is Kind.GRADIENT:
            yield Held(
                "w", MISSING if self.behaviour.get("missing") and self.rank.world_size > 1 else self.gradient, (3,)
            )

    def _save(self, path):
        import torch
        from safetensors.torch import save_file

        self.behaviour.get("save", lambda *_: None)(self.rank)
        path.mkdir(exist_ok=True)
        save_file({"w": self.weight, "rng": torch.get_rng_state()}, path / f"{self.rank.rank}.safetensors")

    def _load(self, path):
        import torch
        from safetensors.torch import load_file

        self.behaviour.get("load", lambda *_: None)(self.rank)
        state = load_file(path / f"{self.rank.rank}.safetensors")
        self.weight.copy_(state["w"])
        torch.set_rng_state(state["rng"])


class Own:
    """A target of a few lines, as its users write them; `behaviour` says how its ranks misbehave."""

    name = "own"

    def __init__(self, **behaviour):
        self.behaviour = behaviour
        self.promises = Promises(resume=behaviour.get("resume", "bitwise"))

    def cases(self):
        return data_parallel_cases(optimizers=("sgd",))

    def build(self, case, rank):
        self.behaviour.get("build", lambda *_: None)(rank)
        return Linear(rank, case, self.behaviour)

    def faults(self):
        return {"dies": Fault("", lambda: contextlib.nullcontext()), "patches": Fault("", patch)}


@contextlib.contextmanager
def patch():
    """Wrong as long as it is entered: the environment of the rank carries the mark."""
    os.environ["PATCHED"] = "yes"
    try:
        yield
    finally:
        del os.environ["PATCHED"]


@pytest.fixture
def run(worlds, tmp_path):
    def do(target, case=CASE, fault=None, deadline_s=None):
        try:
            return Runner(worlds.pool, target, tmp_path, deadline_s)(case, fault)
        finally:
            assert list(tmp_path.iterdir()) == []

    return do


def statuses(evidence):
    return {invariant.id: invariant.judge(evidence).status for invariant in BUILT_IN}


def on_rank(number, action):
    def act(rank, *_):
        if rank.rank == number:
            action()

    return act


def fail(error):
    def act():
        raise error

    return act


def test_the_reference_implementation_holds_all_that_is_promised(run):
    evidence = run(impl_target, PIPELINE)
    assert evidence.lost == {}
    assert statuses(evidence) == dict.fromkeys(statuses(evidence), "holds")
    assert [snapshot.step for snapshot in evidence.replicas if snapshot.rank == 0] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert {loss.step for loss in evidence.losses} == {1, 2, 3, 4}
    assert len(evidence.resume.resumed) == len(evidence.resume.uninterrupted) == 2 * 4
    assert {peak.peak for peak in evidence.activations if peak.stage == 0} == {2}


@pytest.mark.parametrize("resume", ["bitwise", "tolerance"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_target_of_a_few_lines_is_judged_without_a_reference_of_its_own(run, resume, ranks):
    evidence = run(Own(resume=resume), replace(CASE, topology=Topology.of(dp=ranks)))
    found = statuses(evidence)
    assert evidence.lost == {}
    assert {name for name, status in found.items() if status == "not applicable"} == {
        *("schedule.bubble", "schedule.activations", "schedule.deadlock-free", "optimizer.sharded")
    }
    assert set(found.values()) == {"holds", "not applicable"}
    assert "no pipeline" in evidence.absent["schedule"]
    assert bool(evidence.resume.deviations) == (resume == "tolerance")


def test_what_a_trainer_lacks_is_not_applicable(run):
    evidence = run(Own(saves=False, observes=False))
    assert evidence.absent["reload"] == "target own: its trainer does not save"
    assert "does not report its reduced gradients" in evidence.absent["gradients"]
    found = statuses(evidence)
    for name in ("gradients.reference", "parameters.reference", "checkpoint.identical", "checkpoint.resume"):
        assert found[name] == "not applicable"
    assert found["loss.finite"] == found["replicas.agree"] == "holds"
    assert run(Own(), replace(CASE, history=CASE.history[:2])).absent["resume"] == "the history does not save"


def test_skipped_steps_change_nothing(run):
    evidence = run(Own(skips=True))
    assert statuses(evidence)["parameters.reference"] == "holds"
    assert {(update.expected, update.error) for update in evidence.updates} == {(1.0, 0.0)}


def test_a_missing_gradient_is_no_zero(run):
    evidence = run(Own(missing=True))
    assert statuses(evidence)["gradients.reference"] == "violated"
    assert all(seen.missing and seen.rank >= 0 for seen in evidence.gradients)


def test_a_reference_that_trains_on_something_else_is_no_measure(run):
    evidence = run(Own(forgets=True))
    assert "in its own precision is far from itself in float64" in evidence.lost["gradients"]
    assert statuses(evidence)["gradients.reference"] == "unknown"


def test_a_refusal_of_all_ranks_is_the_targets_word(run):
    evidence = run(Own(build=lambda rank: fail(Refused("too few"))()))
    assert evidence.refused == "too few"
    assert set(statuses(evidence).values()) == {"refused"}


def test_a_refusal_of_some_ranks_is_unknown(run):
    evidence = run(Own(build=on_rank(1, fail(Refused("not me")))))
    assert evidence.refused is None
    assert "some ranks refused" in evidence.lost["losses"]
    assert set(statuses(evidence).values()) == {"unknown", "not applicable"}
    assert "holds" in statuses(run(Own())).values(), "the world goes on"


def test_a_case_outside_of_the_domain_is_the_callers_mistake(run):
    with pytest.raises(UsageError, match="own takes no such case"):
        run(Own(build=lambda rank: fail(UsageError("own takes no such case"))()))
    with pytest.raises(UsageError, match="'nonsense': target own has no such fault"):
        run(Own(), fault="nonsense")
    assert "holds" in statuses(run(Own())).values()


def test_a_rank_that_raises_is_named_and_what_it_lost_is_unknown(run):
    evidence = run(Own(step=on_rank(1, fail(ValueError("in the midst")))))
    assert evidence.lost["gradients"].startswith("rank 1 raised ValueError: in the midst")
    assert set(statuses(evidence).values()) == {"unknown", "not applicable"}
    assert "holds" in statuses(run(Own())).values(), "the next case has a fresh world"


def test_a_rank_that_dies_is_named_with_its_status(run):
    evidence = run(Own(step=on_rank(0, lambda: os._exit(3))))
    assert "exit status 3" in evidence.lost["losses"].splitlines()[0]


def test_a_rank_that_hangs_is_named_with_its_stack(run):
    import time

    evidence = run(Own(step=on_rank(1, lambda: time.sleep(60))), deadline_s=3)
    # Whether the deadline or the backend's own, which is a little shorter, is noticed first is a matter of luck.
    of_rank_1 = evidence.lost["losses"].partition("rank 1 was ")[2]
    assert f'"{__file__}"' in of_rank_1


def test_a_load_that_raises_loses_what_comes_after_it_and_nothing_else(run):
    evidence = run(Own(load=on_rank(0, fail(OSError("no such checkpoint")))))
    assert set(evidence.lost) == {"reload", "resume"}
    found = statuses(evidence)
    assert found["checkpoint.identical"] == found["checkpoint.resume"] == "unknown"
    assert found["gradients.reference"] == found["replicas.agree"] == "holds"


def test_a_patch_is_gone_after_its_case_whatever_happened(run, worlds):
    def patched(_context):
        return "PATCHED" in os.environ

    def marked(rank):
        assert "PATCHED" in os.environ

    run(Own(build=marked), fault="patches")
    assert worlds(2).run(patched) == [False, False]
    run(Own(build=lambda rank: fail(Refused("no"))()), fault="patches")
    assert worlds(2).run(patched) == [False, False]
    run(Own(step=on_rank(0, fail(ValueError("x")))), fault="patches")
    assert worlds(2).run(patched) == [False, False]
