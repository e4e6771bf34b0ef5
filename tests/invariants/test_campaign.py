"""Plans and campaigns on literal evidence: no ranks, no torch."""

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invariants.campaign import Campaign, plan
from invariants.case import Case, Topology
from invariants.errors import UsageError, WorldError
from invariants.evidence import Evidence, Loss, Section
from invariants.invariant import Violation, invariant
from invariants.known import Known
from invariants.store import Store
from invariants.strategies import cases, topologies
from invariants.target import Promises

NESTED = settings(deadline=None, suppress_health_check=[HealthCheck.nested_given])


def small():
    """A domain that is quick to draw from."""
    return st.builds(
        Case,
        topology=topologies(),
        microbatches=st.integers(1, 5),
        precision=st.sampled_from(["float64", "float32"]),
        seed=st.integers(0, 999),
    )


ROOT = Path(__file__).parents[2]


class Domain:
    """A target of which nothing but its domain may be asked."""

    name = "domain"
    promises = Promises()

    def __init__(self, strategy=None):
        self.strategy = small() if strategy is None else strategy

    def cases(self):
        return self.strategy

    def build(self, case, rank):
        raise AssertionError("planning runs nothing")


@invariant("loss.finite", needs=[Section.LOSSES])
def finite(evidence):
    """Losses are finite."""
    for loss in evidence.losses:
        if not loss.finite:
            yield Violation("loss", "a finite one", "nan", step=loss.step)


@invariant("loss.first", needs=[Section.LOSSES])
def first(evidence):
    """There is a first loss."""
    if not evidence.losses:
        yield Violation("loss", "one", "none")


def evidence(case, finite=True, **more):
    return Evidence("domain", case, Promises(), losses=(Loss(0, 1, 1.0, 1.0, 0.0, finite),), **more)


def where(*bad):
    """A run whose loss is not finite where one of the predicates is true."""
    return lambda case, fault: evidence(case, finite=not any(each(case) for each in bad))


def sound(case, fault):
    return evidence(case)


@pytest.fixture
def campaign(tmp_path_factory):
    def make(run, planned=None, known=(), target=None, **more):
        target = target or Domain()
        planned = plan(target, 40, 0) if planned is None else planned
        return Campaign(target, planned, 0, run, Store(tmp_path_factory.mktemp("store")), known, **more)

    return make


def known(when, **more):
    return Known(**{"invariant": "loss.finite", "when": when, "reason": "as reported", "report": "issue 7", **more})


# Plans


@settings(NESTED, max_examples=15)
@given(st.integers(1, 12), st.integers(0, 2**32), st.integers(1, 4))
def test_a_plan_has_distinct_cases_of_allowed_worlds_and_a_larger_one_goes_on(count, seed, max_world):
    planned = plan(Domain(), count + 1, seed, max_world)
    assert len(set(planned)) == len(planned) == count + 1
    assert all(case.topology.world_size <= max_world for case in planned)
    assert plan(Domain(), count, seed, max_world) == planned[:-1]


def test_a_plan_begins_with_the_simplest_case_and_seeds_differ():
    plans = [plan(Domain(), 10, seed) for seed in range(3)]
    assert [planned[0] for planned in plans] == [Case(precision="float64")] * 3
    assert len({case for planned in plans for case in planned[1:]}) == 27


def test_a_plan_covers_the_awkward_corners():
    planned = plan(Domain(cases()), 40, 0)
    stages = {case: case.topology.size("pp") for case in planned}
    assert {case.topology.world_size for case in planned} == {1, 2, 3, 4}
    assert sum(case.microbatches < stages[case] for case in planned) >= 2
    assert sum(case.microbatches % stages[case] != 0 for case in planned) >= 5
    assert len({case.mask for case in planned}) == 3


PLANNER = """
import json, random, sys
random.seed(int(sys.argv[1]))
sys.path[:0] = json.loads(sys.argv[2])
for name in sys.argv[3:]:
    __import__(name)
from hypothesis import settings
if len(sys.argv) > 3:
    settings.register_profile("own", derandomize=True, max_examples=3, database=None)
    settings.load_profile("own")
from invariants.campaign import plan
from invariants.strategies import cases
class Domain:
    name = "domain"
    def cases(self):
        return cases()
print(json.dumps([str(case) for case in plan(Domain(), 60, 5)]))
"""


def test_the_plan_is_the_same_in_every_process(tmp_path):
    # Hypothesis draws constants that it finds in imported modules of the project: 3 % of the seeds would be these.
    (tmp_path / "constants.py").write_text(f"NUMBERS = {list(range(100, 999, 7))}")
    planned = [str(case) for case in plan(Domain(cases()), 60, 5)]
    for arguments in (["1", "[]"], ["2", json.dumps([str(tmp_path)]), "constants", "numpy", "invariants.cli"]):
        done = subprocess.run(
            [sys.executable, "-c", PLANNER, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert json.loads(done.stdout) == planned, done.stderr


def test_a_plan_leaves_global_generators_as_they_were():
    random.seed(3)
    np.random.seed(4)
    before = random.getstate(), np.random.get_state()[1].tolist()
    plans = [plan(Domain(), 5, 0)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(5)
    plans.append(plan(Domain(), 5, 0))
    assert plans[0] == plans[1]


def test_a_domain_smaller_than_the_plan_is_used_up():
    few = [Case(), Case(microbatches=2), Case(microbatches=3)]
    assert sorted(plan(Domain(st.sampled_from(few)), 40, 0), key=str) == sorted(few, key=str)
    assert plan(Domain(st.just(Case())), 40, 0) == (Case(),)


def test_cases_of_larger_worlds_are_left_out():
    sizes = st.integers(1, 9).map(lambda dp: Case(topology=Topology.of(pp=1, dp=dp)))
    assert {case.topology.world_size for case in plan(Domain(sizes), 40, 0)} == set(range(1, 9))
    assert {case.topology.world_size for case in plan(Domain(sizes), 40, 0, max_world=3)} == {1, 2, 3}


@st.composite
def raising(draw):
    raise ZeroDivisionError(f"first {draw(st.just('line'))}\nsecond line")


@st.composite
def exiting(draw):
    sys.exit(draw(st.just(0)))


class Exiting(Domain):
    def cases(self):
        sys.exit(0)


@pytest.mark.parametrize(
    ("target", "arguments", "named"),
    [
        (Exiting(), {}, "drawing from its .* failed with SystemExit: 0$"),
        (Domain(exiting()), {}, "drawing from its .* failed with SystemExit: 0$"),
        (Domain(raising()), {}, "drawing from its .* failed with ZeroDivisionError: first line$"),
        (Domain(st.integers()), {}, r"drew -?\d+; expected an invariants\.case\.Case"),
        (Domain(3), {}, "drawing from its .* failed with InvalidArgument"),
        (Domain(st.nothing()), {}, "domain: "),
        (Domain(cases().filter(lambda case: False)), {}, "drew nothing in 100 attempts; loosen its filters"),
        (Domain(cases().filter(lambda case: case.topology.world_size > 2)), {"max_world": 2}, "allow 3 or more"),
        (Domain(), {"count": 0}, "cases=0: expected 1 or more"),
        (Domain(), {"max_world": 0}, "every case needs more than the 0 ranks that are allowed; allow 1 or more"),
    ],
)
def test_what_gives_no_plan_is_the_users_mistake(target, arguments, named):
    with pytest.raises(UsageError, match=named) as caught:
        plan(**{"target": target, "count": 5, "seed": 0, **arguments})
    assert len(str(caught.value).splitlines()) == 1


def test_an_exit_while_a_violation_shrinks_is_the_users_mistake(campaign):
    target = Domain()
    judged = campaign(where(lambda case: case.microbatches > 2), target=target)

    @st.composite
    def leaving(draw):
        case = draw(small())
        if case not in judged.cases:
            sys.exit(0)
        return case

    target.strategy = leaving()
    with pytest.raises(UsageError, match=r"drawing from its .* failed with SystemExit: 0$"):
        judged.judge(finite)


# Gathering


def test_every_case_runs_once_whatever_the_number_of_invariants(campaign):
    judged = campaign(sound)
    seen = []
    judged.gather(lambda done, total: seen.append((done, total)))
    assert seen == [(done, 40) for done in range(1, 41)]
    assert {judged.judge(each).status for each in (finite, first) * 3} == {"holds"}
    assert sorted(judged.store.runs()) == sorted(f"plan - {case}" for case in judged.cases)


WORKER = """
import json, sys, time
from pathlib import Path
from invariants.campaign import Campaign, plan
from hypothesis import strategies as st
from invariants.case import Case
from invariants.evidence import Evidence, Loss, Section
from invariants.invariant import Violation, invariant
from invariants.store import Store
from invariants.strategies import topologies
from invariants.target import Promises

class Domain:
    name = "domain"
    def cases(self):
        return st.builds(Case, topology=topologies(), microbatches=st.integers(1, 5))

def run(case, fault):
    time.sleep(0.01)  # what a run takes: the others come by meanwhile
    return Evidence("domain", case, Promises(), losses=(Loss(0, 1, 1.0, 1.0, 0.0, case.microbatches < 3),))

@invariant("loss.finite", needs=[Section.LOSSES])
def finite(evidence):
    "Losses are finite."
    if not evidence.losses[0].finite:
        yield Violation("loss", "a finite one", "nan")

planned = plan(Domain(), 30, 1)
print(json.dumps([str(case) for case in planned]), flush=True)
campaign = Campaign(Domain(), planned, 1, run, Store(Path(sys.argv[1])))
sys.stdin.readline()
judgements = [campaign.judge(finite) for _ in range(2)]
print(json.dumps([[each.status, dict(each.counts), str(each.verdict.case)] for each in judgements]))
"""


def test_three_workers_run_every_case_once_and_judge_alike(tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(3)]
    try:
        planned, *others = [json.loads(worker.stdout.readline()) for worker in workers]
        for worker in workers:  # all are ready, now they start
            worker.stdin.write("\n")
            worker.stdin.flush()
        answers = [json.loads(worker.communicate(timeout=60)[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()
    assert others == [planned] * 2
    runs = Counter(Store(tmp_path).runs())
    assert [runs[f"plan - {case}"] for case in planned] == [1] * 30
    assert set(runs.values()) == {1}
    assert sum(line.startswith("plan") for line in runs) == 30
    (first, again), *rest = answers
    assert first == again
    assert first[0] == "violated"
    assert rest == [[first, again]] * 2


def test_a_case_that_another_worker_never_ends_is_an_error_that_names_it(campaign, monkeypatch):
    judged = campaign(sound)
    stuck = judged.cases[7]
    fetch = judged.store.fetch

    def bounded(case, fault, run, *, wait=True, **more):
        if case != stuck:
            return fetch(case, fault, run, wait=wait, **more)
        if wait:
            raise WorldError(f"case {case}: another worker")
        return None

    monkeypatch.setattr(judged.store, "fetch", bounded)
    with pytest.raises(WorldError, match="another worker"):
        judged.gather()
    assert len(judged.store.runs()) == 39


# Judging

PLANNED = tuple(Case(microbatches=m) for m in range(1, 7))
BAD = {"finite": False}
DIED = {"losses": None, "lost": {"losses": "rank 1 died: killed by SIGKILL\nlast line"}}
NONE = {"losses": None, "absent": {"losses": "it reports no loss\nat all"}}
REFUSED = {"refused": "torch wants more microbatches\nTraceback"}


@pytest.mark.parametrize(
    ("by_case", "entries", "status", "reason"),
    [
        ([{}], [], "holds", ""),
        ([REFUSED, NONE, {}], [], "holds", ""),
        ([{}, DIED], [], "unknown", "rank 1 died: killed by SIGKILL"),
        ([DIED, BAD, {}], [], "violated", "1 of 3 cases; step 1: loss: expected a finite one, observed nan"),
        ([BAD, {}], [known("m == 1")], "holds", ""),
        ([REFUSED, BAD, NONE], [known("m == 2")], "known", "as reported (issue 7)"),
        (
            [BAD, BAD],
            [known("m == 1"), known("m == 2", reason="so too")],
            "known",
            "as reported (issue 7); so too (issue 7)",
        ),
        ([BAD, BAD], [known("m == 1")], "violated", "1 of 2 cases; step 1: loss: expected a finite one, observed nan"),
        ([BAD], [known("True", invariant="loss.first")], "violated", "1 of 1 cases; step 1: loss: "),
        ([DIED], [known("True", failure="SIGKILL")], "known", "as reported (issue 7)"),
        ([DIED], [known("True")], "unknown", "rank 1 died: killed by SIGKILL"),
        ([NONE, REFUSED], [], "refused", "torch wants more microbatches"),
        ([NONE, NONE], [], "not applicable", "it reports no loss"),
        ([], [], "not applicable", "no case was planned"),
    ],
)
def test_the_worst_verdict_decides(campaign, by_case, entries, status, reason):
    planned = PLANNED[: len(by_case)]
    outcome = dict(zip(planned, by_case, strict=True))

    def run(case, fault):
        more = outcome[case]
        return replace(evidence(case, more.get("finite", True)), **{k: v for k, v in more.items() if k != "finite"})

    judged = campaign(run, planned, entries, Domain(st.sampled_from(PLANNED)), shrink_runs=0)
    judgement = judged.judge(finite)
    assert (judgement.status, judgement.reason[: len(reason)]) == (status, reason)
    assert len(judgement.reason.splitlines()) <= 1
    assert (judgement.invariant, sum(judgement.counts.values())) == ("loss.finite", len(planned))
    assert sum(count for _, count in judgement.known) == judgement.counts.get("known", 0)
    assert {entry for entry, _ in judgement.known} <= set(entries)
    assert (judgement.verdict is None) == (status not in ("violated", "unknown"))
    if judgement.verdict:
        assert judgement.verdict.status == status


def test_the_first_unknown_case_is_the_verdict(campaign):
    def run(case, fault):
        return replace(evidence(case), **DIED) if case.microbatches > 2 else evidence(case)

    judgement = campaign(run, PLANNED).judge(finite)
    assert judgement.verdict.case == PLANNED[2]
    assert judgement.verdict.reason == DIED["lost"]["losses"]
    assert judgement.counts == {"holds": 2, "unknown": 4}


def test_a_known_violation_that_fits_no_case_is_refused_before_anything_runs(campaign):
    with pytest.raises(UsageError, match="pp < schedule"):
        campaign(sound, PLANNED, [known("m > 3 and pp < schedule")])


# Shrinking


def two_stages(case):
    return case.topology.size("pp") > 1 and case.microbatches > 2


def single_precision(case):
    return case.precision == "float32" and case.topology.size("dp") > 1


def test_a_violation_shrinks_to_the_smallest_case_and_its_runs_are_counted_apart(campaign):
    judged = campaign(where(two_stages))
    judgement = judged.judge(finite)
    case = judgement.verdict.case
    assert (judgement.status, judgement.verdict.status) == ("violated", "violated")
    assert case == Case(topology=Topology.of(pp=2, dp=1), microbatches=3, precision="float64")
    purposes = Counter(line.split()[0] for line in judged.store.runs())
    assert purposes == {"plan": 40, "shrink": judgement.extra_runs}
    assert 0 < judgement.extra_runs <= 60
    assert set(Counter(judged.store.runs()).values()) == {1}
    assert judgement.counts["violated"] == sum(two_stages(case) for case in judged.cases)


def test_a_case_of_the_whole_domain_shrinks_too(campaign):
    judgement = campaign(where(two_stages), target=Domain(cases())).judge(finite)
    assert judgement.verdict.case.topology == Topology.of(pp=2, dp=1)
    assert judgement.verdict.case.microbatches == 3
    assert judgement.verdict.case.mask == "full"


def test_shrinking_is_deterministic_and_keeps_global_generators(campaign):
    before = random.getstate()
    judgements = [campaign(where(single_precision)).judge(finite) for _ in range(2)]
    assert random.getstate() == before
    assert judgements[0] == judgements[1]


def test_a_second_judgement_finds_its_runs_in_the_store(campaign):
    judged = campaign(where(two_stages))
    once, again = judged.judge(finite), judged.judge(finite)
    assert again == replace(once, extra_runs=0)


@settings(NESTED, max_examples=10)
@given(st.integers(0, 25), st.sampled_from([two_stages, single_precision]))
def test_a_budget_is_kept_and_the_case_violates(tmp_path_factory, budget, bad):
    store = Store(tmp_path_factory.mktemp("store"))
    judged = Campaign(Domain(), plan(Domain(), 20, 0), 0, where(bad), store, shrink_runs=budget)
    judgement = judged.judge(finite)
    assert bad(judgement.verdict.case)
    assert judgement.extra_runs <= budget
    assert len(store.runs()) == 20 + judgement.extra_runs
    if budget == 0:
        assert judgement.verdict.case == next(case for case in judged.cases if bad(case))


def test_another_violation_behind_a_known_one_is_found_and_shrinks_to_itself(campaign):
    judgement = campaign(where(two_stages, single_precision), known=[known("pp > 1 and m > 2")]).judge(finite)
    assert judgement.status == "violated"
    assert single_precision(judgement.verdict.case)
    assert not two_stages(judgement.verdict.case)
    assert judgement.verdict.case.topology == Topology.of(pp=1, dp=2)
    assert judgement.counts["known"] == judgement.known[0][1] > 0
    assert campaign(where(two_stages), known=[known("pp > 1 and m > 2")]).judge(finite).status == "holds"


def test_a_known_case_is_no_step_on_the_way_to_a_smaller_one(campaign):
    # Known where it is smallest: the search ends beside it, not in it.
    case = campaign(where(two_stages), known=[known("pp == 2")]).judge(finite).verdict.case
    assert case.topology.size("pp") > 2
    assert case == Case(topology=case.topology, microbatches=3, precision="float64")


def test_a_case_that_was_not_planned_from_this_domain_is_shown_as_it_is(campaign):
    judged = campaign(where(two_stages), [Case(topology=Topology.of(pp=4, dp=2), microbatches=9)])
    judgement = judged.judge(finite)
    assert (judgement.verdict.case, judgement.extra_runs) == (judged.cases[0], 0)


def test_shrinking_starts_no_world_larger_than_the_plan_has(campaign):
    # The domain's larger worlds count as the simpler ones.
    sizes = st.integers(-6, -1).map(lambda size: Case(topology=Topology.of(dp=-size))) | cases(max_world=1)
    target = Domain(st.sampled_from([6, 2, 1]).flatmap(lambda dp: st.just(Case(topology=Topology.of(dp=dp)))) | sizes)
    judged = campaign(where(lambda case: True), plan(target, 9, 0, max_world=2), target=target)
    judged.judge(finite)
    worlds = {Case.parse(line.split()[-1]).topology.world_size for line in judged.store.runs()}
    assert worlds == {1, 2}


def test_an_error_of_ours_ends_the_search_as_itself(campaign):
    judged = campaign(where(two_stages))
    judged.gather()
    calls = []

    def broken(case, fault):
        calls.append(case)
        raise RuntimeError("the pool is gone")

    judged.run = broken
    with pytest.raises(RuntimeError, match="the pool is gone"):
        judged.judge(finite)
    assert len(calls) == 1
