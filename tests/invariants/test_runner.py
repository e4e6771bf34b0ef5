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
        self.velocity = torch.zeros_like(self.weight)
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
        told = self.behaviour
        if told.get("infinite") and self.rank.world_size > 1:
            self.gradient *= float("inf")
        if told.get("observes", True) and told.get("forgets_to_observe") != (self.rank.rank, self.steps):
            observe(told.get("moment", Moment.REDUCED))
        skipped = told.get("skips", False)
        if not skipped:
            self.velocity = told.get("momentum", 0) * self.velocity + self.gradient
            self.weight -= self.case.optimizer.lr * self.velocity
        self.steps += 1
        if "result" in told:
            return told["result"]
        return StepResult(told.get("loss", torch.tensor(loss) if told.get("tensor_loss") else loss), skipped=skipped)

    def held(self, kind):
        if kind is Kind.PARAMETER:
            yield Held("w", self.weight.clone() if self.behaviour.get("copies") else self.weight, (3,))
        elif kind is Kind.OPTIMIZER and self.behaviour.get("momentum"):
            yield Held("w", self.velocity, (3,), state_key="momentum_buffer")
        elif kind is Kind.GRADIENT and self.behaviour.get("none"):
            yield Held("w", None, (3,))
        elif kind is Kind.GRADIENT:
            yield Held(
                "w", MISSING if self.behaviour.get("missing") and self.rank.world_size > 1 else self.gradient, (3,)
            )

    def _save(self, path):
        import torch
        from safetensors.torch import save_file

        self.behaviour.get("save", lambda *_: None)(self.rank)
        path.mkdir(exist_ok=True)
        save_file(
            {"w": self.weight, "v": self.velocity, "rng": torch.get_rng_state()}, path / f"{self.rank.rank}.safetensors"
        )

    def _load(self, path):
        import torch
        from safetensors.torch import load_file

        self.behaviour.get("load", lambda *_: None)(self.rank)
        state = load_file(path / f"{self.rank.rank}.safetensors")
        self.velocity.copy_(state["v"])
        if self.behaviour.get("reads", True):
            self.weight.copy_(state["w"])
        torch.set_rng_state(state["rng"])


class Own:
    """A target of a few lines, as its users write them; `behaviour` says how its ranks misbehave."""

    name = "own"

    def __init__(self, **behaviour):
        self.behaviour = behaviour
        state_tensors = 1 if "momentum" in behaviour else None
        self.promises = Promises(resume=behaviour.get("resume", "bitwise"), state_tensors=state_tensors)

    def cases(self):
        return data_parallel_cases(optimizers=("sgd",))

    def build(self, case, rank):
        self.behaviour.get("build", lambda *_: None)(rank)
        return Linear(rank, case, self.behaviour)

    def faults(self):
        return {"dies": Fault("", lambda: contextlib.nullcontext()), "patches": Fault("", patch)}


class Misfit(Own):
    """Hands over, in the place of `held`'s tensors or of its count of steps, what `behaviour` says."""

    def build(self, case, rank):
        trainer = super().build(case, rank)
        if "holds" in self.behaviour:
            trainer.held = lambda kind: self.behaviour["holds"]
        trainer.steps_done = lambda: self.behaviour.get("counts", 0)
        return trainer


class Fed(Own):
    """Has the data that `behaviour` says."""

    def window(self, case, step):
        return self.behaviour["window"]


def rowless(*arguments):
    """A trainer with a pipeline that has no row."""
    trainer = Linear(*arguments)
    trainer.schedule, trainer.stages = (lambda: None), (lambda: ())
    return trainer


def empty(*arguments):
    """A trainer that says that it holds nothing."""
    trainer = Linear(*arguments)
    trainer.held = lambda kind: ()
    return trainer


class WithRule(Own):
    """Says how it updates."""

    def update_rule(self, case, parameters):
        import torch

        return torch.optim.SGD(parameters.values(), lr=case.optimizer.lr, momentum=self.behaviour["momentum"]).step


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
        *(invariant.id for invariant in BUILT_IN if invariant.id.startswith("schedule.")),
        "optimizer.sharded",
        *("p2p.paired", "buffers.stable", "traffic.volume"),
        *(("collectives.agree", "p2p.portable") if ranks == 1 else ()),
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


def test_a_skip_excuses_no_update_by_finite_gradients(run):
    assert statuses(run(Own(skips=True)))["parameters.reference"] == "violated"
    infinite = run(Own(skips=True, infinite=True))
    assert {(update.expected, update.error) for update in infinite.updates} == {(1.0, 0.0)}
    assert statuses(infinite)["gradients.reference"] == "violated"


def test_one_report_that_is_missing_is_not_the_absence_of_all(run):
    evidence = run(Own(forgets_to_observe=(1, 2)))
    assert "rank 1 did not report its reduced gradients in step 3" in evidence.lost["gradients"]
    assert statuses(evidence)["gradients.reference"] == "unknown"


def test_an_update_rule_of_the_target_is_the_measure(run):
    assert statuses(run(Own(momentum=0.9)))["parameters.reference"] == "violated"
    for resume in ("bitwise", "tolerance"):
        found = statuses(run(WithRule(momentum=0.9, resume=resume)))
        assert "violated" not in found.values(), found
        assert found["parameters.reference"] == found["checkpoint.resume"] == "holds"


def test_what_a_load_leaves_out_is_not_found_as_the_seed_made_it(run):
    found = statuses(run(Own(load=lambda rank: None, reads=False)))
    assert found["checkpoint.identical"] == "violated"


def test_the_losses_of_the_resumed_run_are_evidence(run):
    evidence = run(Own())
    assert [(loss.rank, loss.step) for loss in evidence.resume.losses] == [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert all(loss.reported == loss.reference and loss.tolerance == 0 for loss in evidence.resume.losses)
    assert all(loss.tolerance > 0 for loss in run(Own(resume="tolerance")).resume.losses)


def test_a_refusal_in_fresh_processes_alone_loses_the_reload(run, tmp_path_factory):
    mark = tmp_path_factory.mktemp("marks")

    def once(rank):
        place = mark / str(rank.rank)
        if place.exists():
            raise Refused("built before")
        place.touch()

    evidence = run(Own(build=lambda rank: rank.world_size > 1 and once(rank)))
    assert evidence.refused is None
    assert "built before" in evidence.lost["reload"]
    assert statuses(evidence)["gradients.reference"] == "holds"


def test_a_refusal_without_words_is_one(run):
    assert run(Own(build=lambda rank: fail(Refused())())).refused == "without a reason"


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"result": 1.0}, "step returned float: expected a StepResult"),
        ({"loss": "high"}, "StepResult.loss is a str: expected a number"),
        ({"moment": "reduced"}, "expected Moment.REDUCED"),
        ({"copies": True}, "held(PARAMETER) yields a copy of w"),
        ({"none": True}, "held w: NoneType for a tensor: where there is none, say MISSING"),
    ],
)
def test_a_mistake_of_an_adapter_is_named(run, behaviour, words):
    evidence = run(Own(**behaviour))
    assert any(words in reason for reason in evidence.lost.values()), evidence.lost


def test_a_loss_may_be_a_tensor(run):
    assert statuses(run(Own(tensor_loss=True)))["loss.finite"] == "holds"


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


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (lambda *_: None, "target own: build returned a NoneType without step and held: expected a trainer"),
        (rowless, "target own: schedule returned a NoneType: expected this rank's cells"),
        (empty, "target own: held(Kind.PARAMETER) yields nothing on any rank"),
    ],
)
def test_what_is_no_trainer_is_the_targets_mistake(run, trainer, words):
    target = Own()
    target.build = lambda case, rank: trainer(rank, case, {})
    with pytest.raises(UsageError) as mistake:
        run(target)
    assert str(mistake.value).startswith(words)
    assert "holds" in statuses(run(Own())).values()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"holds": None}, "held returned a NoneType: expected Held objects"),
        ({"window": None}, "window of step 0: no batch: expected one GlobalBatch or more"),
        ({"window": [1, 2.0]}, "window of step 0: float, int: expected one GlobalBatch or more"),
        ({"result": 1.0}, "step returned float: expected a StepResult"),
        ({"counts": None}, "steps_done returned a NoneType: expected a number"),
    ],
)
def test_a_mistake_in_what_a_rank_hands_over_is_one_line(run, behaviour, words):
    evidence = run((Fed if "window" in behaviour else Misfit)(**behaviour))
    rank, _, told = evidence.lost["losses"].partition(": ")
    assert rank in ("rank 0", "rank 1")
    assert told.startswith(words)
    assert "\n" not in told


def test_all_that_a_failing_build_loses_has_its_reason(run):
    evidence = run(Own(build=lambda rank: fail(OSError("no such device"))()))
    found = [verdict for verdict in (each.judge(evidence) for each in BUILT_IN) if verdict.status == "unknown"]
    assert {verdict.reason.splitlines()[0].partition(" raised ")[2] for verdict in found} == {
        "OSError: no such device (world of 2)"
    }
    assert "schedule.complete" in {verdict.invariant for verdict in found}


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
    assert set(evidence.lost) == {"reload", "resume", "communication"}
    found = statuses(evidence)
    assert found["checkpoint.identical"] == found["checkpoint.resume"] == "unknown"
    assert found["gradients.reference"] == found["replicas.agree"] == "holds"


def test_what_ranks_communicate_is_kept_by_rank_step_and_run(run):
    evidence = run(Own())
    reduced = {
        (row.rank, row.step, row.resumed): [each.kind for each in row.operations]
        for row in evidence.communication
        if row.inside
    }
    places = [(rank, step, False) for rank in range(2) for step in range(1, 5)]
    places += [(rank, step, True) for rank in range(2) for step in (3, 4)]
    assert reduced == {place: ["all_reduce"] for place in places}


def test_a_record_that_is_not_whole_is_lost(run):
    def overflow(rank, step):
        from invariants.world.record import LOST

        rank.recorder._writer.words[LOST] = rank.rank

    evidence = run(Own(step=overflow))
    assert evidence.communication is None
    assert evidence.lost["communication"] == "a rank communicated more than its record holds"
    found = statuses(evidence)
    assert found["collectives.agree"] == "unknown"
    assert found["gradients.reference"] == "holds"


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


def test_building_imports_no_compiler_on_a_rank(worlds):
    def imported(context):
        import sys

        impl_target.build(PIPELINE, context)
        return "numba" in sys.modules

    assert worlds.fresh(4).run(imported) == [False] * 4
