"""Fault by invariant, from runs without ranks: what is caught, what is flagged, what is left unsaid."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invariants.case import Case, Save, Step, Topology
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.matrix import matrix
from invariants.target import Fault, Promises

WORLDS = (4, 3, 2, 1)
CASES = tuple(Case(topology=Topology.of(pp=1, dp=size), seed=size) for size in WORLDS)
SAID = ("holds", "violated", "unknown", "refused", "not applicable")


@invariant("toy.schedule", needs=[Section.SCHEDULE])
def toy_schedule(evidence):
    """The schedule is empty."""
    if evidence.schedule:
        yield Violation("cells", "none", "one", step=1)


@invariant("toy.losses", needs=[Section.LOSSES])
def toy_losses(evidence):
    """There are no losses."""
    return ()


INVARIANTS = (toy_schedule, toy_losses)


def planted(harmless=False, **kwargs):
    return Fault("why", nullcontext, harmless=harmless, **kwargs)


class Runs:
    """What `toy.schedule` says of a case under a fault, by fault and world; `toy.losses` is never judged."""

    def __init__(self, **said):
        self.said = said
        self.made = []

    def __call__(self, case, fault):
        self.made.append((fault, case))
        said = self.said.get(fault or "nothing", {}).get(case.topology.world_size, "holds")
        return Evidence(
            "toy",
            case,
            Promises(),
            refused="not today" if said == "refused" else None,
            lost={"schedule": "rank 1 died\nof something"} if said == "unknown" else {},
            absent={"losses": "none"} | ({"schedule": "none"} if said == "not applicable" else {}),
            schedule={"holds": (), "violated": (("0F0",),)}.get(said),
        )

    def under(self, fault):
        return [case.topology.world_size for name, case in self.made if name == fault]


def row(fault, runs, cases=CASES, **kwargs):
    (only,) = matrix({"planted": fault}, cases, INVARIANTS, runs, **kwargs)
    return only


def test_a_fault_is_run_until_it_is_caught_large_worlds_first():
    runs = Runs(planted={2: "violated", 1: "violated"})
    caught = row(planted(), runs, cases=CASES[::-1])
    assert runs.under("planted") == [4, 3, 2]
    assert (caught.outcome, caught.passed, set(caught.violated)) == ("caught", True, {"toy.schedule"})
    assert caught.telling == CASES[2]


def test_among_worlds_of_one_size_those_that_save_come_first():
    saves = Case(history=(Step(), Save(), Step()))
    plain = Case(history=(Step(), Step()))
    runs = Runs()
    row(planted(), runs, cases=(plain, saves))
    assert [case for _, case in runs.made] == [saves, plain]


def test_what_is_violated_without_the_fault_catches_nothing():
    runs = Runs(nothing={4: "violated", 3: "unknown"}, planted={4: "violated", 3: "unknown", 2: "holds"})
    missed = row(planted(), runs, tries=3)
    assert (missed.outcome, missed.violated, missed.unknown) == ("not caught", {}, {})
    assert runs.under("planted") == [4, 3, 2]
    assert runs.under(None) == [4, 3]


def test_a_rank_that_dies_is_a_mark_and_no_catch():
    missed = row(planted(), Runs(planted=dict.fromkeys(WORLDS, "unknown")), tries=2)
    assert (missed.outcome, missed.passed, set(missed.unknown)) == ("not caught", False, {"toy.schedule"})
    assert missed.marked == {"toy.schedule"}
    assert missed.telling == CASES[0]


@pytest.mark.parametrize(
    ("said", "variants", "outcome", "run"),
    [
        ({}, 2, "clean", [4, 3]),
        ({3: "violated"}, 2, "flagged", [4, 3]),
        ({3: "unknown"}, 2, "flagged", [4, 3, 2]),  # of what is unknown, nothing was judged
        ({4: "refused", 3: "not applicable"}, 2, "clean", [4, 3, 2, 1]),
        (dict.fromkeys(WORLDS, "refused"), 1, "not judged", [4, 3, 2]),
        ({}, 4, "clean", [4, 3, 2, 1]),
    ],
)
def test_a_variant_is_clean_where_cases_were_judged_and_none_cried(said, variants, outcome, run):
    runs = Runs(planted=said)
    tries = max(3, 4 if len(run) == 4 else 0)
    variant = row(planted(harmless=True), runs, tries=tries, variants=variants)
    assert (variant.outcome, runs.under("planted")) == (outcome, run)
    assert variant.passed is (outcome == "clean")


@pytest.mark.parametrize("harmless", [False, True])
def test_a_fault_that_applies_to_no_case_is_not_passed_over(harmless):
    runs = Runs()
    idle = row(planted(harmless, applies=lambda case: case.microbatches > 1), runs)
    assert (idle.outcome, idle.passed, idle.telling, runs.made) == ("no case", False, None, [])


def test_variants_come_last_and_progress_names_each():
    told = []
    faults = {"first": planted(harmless=True), "second": planted(), "third": planted(applies=lambda _: False)}
    rows = matrix(faults, CASES, INVARIANTS, Runs(), progress=lambda *each: told.append(each))
    assert [row.name for row in rows] == ["second", "third", "first"]
    assert told == [(0, 3, "second"), (1, 3, "third"), (2, 3, "first")]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(WORLDS), st.sampled_from(SAID)),
    st.dictionaries(st.sampled_from(WORLDS), st.sampled_from(SAID)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
)
def test_whatever_the_runs_say(healthy, faulty, tries, variants, harmless):
    runs = Runs(nothing=healthy, planted=faulty)
    found = row(planted(harmless), runs, tries=tries, variants=variants)
    under = runs.under("planted")
    assert under == [case.topology.world_size for case in found.cases] == list(WORLDS[: len(under)])
    assert len(under) <= (max(tries, variants) if harmless else tries)
    assert len(set(runs.made)) == len(runs.made)  # no run is made twice, the healthy ones included
    differing = {
        status: [size for size in under if faulty.get(size, "holds") == status != healthy.get(size, "holds")]
        for status in ("violated", "unknown")
    }
    assert bool(found.violated) == bool(differing["violated"])
    assert bool(found.unknown) == bool(differing["unknown"])
    if not harmless:
        assert found.passed == bool(differing["violated"])
        assert differing["violated"] in ([], under[-1:])
    else:
        assert found.judged == sum(faulty.get(size, "holds") in ("holds", "violated") for size in under)
        assert found.passed == (not any(differing.values()) and found.judged > 0)
