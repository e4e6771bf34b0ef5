"""checkpoint.identical, judged on literal evidence; no processes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Case, Save, Step, Topology
from invariants.catalog.checkpoint_identical import checkpoint_identical
from invariants.evidence import Evidence, Print, Reload, State
from invariants.target import Promises

CASE = Case(topology=Topology.of(dp=2), history=(Step(), Save(), Step(), Step()))
WEIGHT = Print("w", 0, 4, "float32", "aa", 1.0)
MOMENT = Print("w", 0, 2, "float32", "bb", 0.5, "exp_avg")
COUNTER = Print("buffer", 0, 1, "float32", "cc", 3.0, "step")


def state(rank=0, **changes):
    whole = State(rank, (WEIGHT,), (MOMENT, COUNTER), (("torch", f"t{rank}"), ("python", f"p{rank}")), 1)
    return replace(whole, **changes)


def identical(saved, loaded, ranks=1):
    case = replace(CASE, topology=Topology.of(dp=ranks))
    return checkpoint_identical.judge(Evidence("literal", case, Promises(), reload=Reload(saved, loaded)))


@settings(deadline=None)
@given(st.permutations(range(3)), st.permutations(range(3)))
def test_what_is_given_back_holds_in_whatever_order_ranks_report(saved, loaded):
    assert identical(tuple(map(state, saved)), tuple(map(state, loaded)), ranks=3).status == "holds"


def test_trainers_without_state_generators_or_step_count_hold():
    bare = state(parameters=(), optimizer=(), generators=(), steps=None)
    assert identical((bare,), (bare,)).status == "holds"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_count_may_leave_out_what_was_skipped(steps):
    assert identical((state(steps=steps),), (state(steps=steps),)).status == "holds"


def test_a_count_of_more_steps_than_were_made_is_wrong_however_well_it_is_restored():
    verdict = identical((state(steps=2),), (state(steps=2),))
    (seen,) = verdict.violations
    assert (seen.what, seen.expected, seen.observed, seen.rank) == ("steps done, as saved", "1 at most", "2", 0)


ZEROED = replace(MOMENT, digest="00", norm=0.0)
CHANGES = {
    "other bits": ({"parameters": (replace(WEIGHT, digest="ab"),)}, "w", "loaded parameter, elements 0 to 3"),
    "other dtype": ({"parameters": (replace(WEIGHT, dtype="float64"),)}, "w", "loaded parameter, elements 0 to 3"),
    "a parameter is lost": ({"parameters": ()}, "w", "loaded parameter, elements 0 to 3"),
    "a parameter is added": (
        {"parameters": (WEIGHT, replace(WEIGHT, name="v"))},
        "v",
        "loaded parameter, elements 0 to 3",
    ),
    "moments at zero": ({"optimizer": (ZEROED, COUNTER)}, "w", "loaded optimizer state exp_avg, elements 0 to 1"),
    "moments lost": ({"optimizer": (COUNTER,)}, "w", "loaded optimizer state exp_avg, elements 0 to 1"),
    "one of two equal places": (
        {"optimizer": (MOMENT, COUNTER, replace(COUNTER, digest="cd"))},
        "buffer",
        "loaded optimizer state step, element 0",
    ),
    "counter lost": ({"optimizer": (MOMENT,)}, "buffer", "loaded optimizer state step, element 0"),
    "an empty piece is lost": (
        {"optimizer": (MOMENT, COUNTER, Print("w", 4, 4, "float32", "", 0.0, "exp_avg_sq"))},
        "w",
        "loaded optimizer state exp_avg_sq, no elements",
    ),
    "another generator's state": (
        {"generators": (("torch", "t1"), ("python", "p0"))},
        None,
        "loaded random generator torch",
    ),
    "a generator is lost": ({"generators": (("torch", "t0"),)}, None, "loaded random generator python"),
    "a generator is added": (
        {"generators": (("torch", "t0"), ("python", "p0"), ("numpy", "n0"))},
        None,
        "loaded random generator numpy",
    ),
    "steps from 0": ({"steps": 0}, None, "steps done"),
    "steps unknown": ({"steps": None}, None, "steps done"),
}


@pytest.mark.parametrize("there", [False, True], ids=["loaded", "saved"])
@pytest.mark.parametrize(("changes", "tensor", "what"), CHANGES.values(), ids=CHANGES)
def test_one_difference_is_one_violation_on_whichever_side(changes, tensor, what, there):
    other = state(**changes)
    saved, loaded = (other, state()) if there else (state(), other)
    (violation,) = identical((saved,), (loaded,)).violations
    assert (violation.what, violation.tensor, violation.rank, violation.step) == (what, tensor, 0, 1)
    assert violation.expected != violation.observed


def test_a_shard_at_another_place_is_lost_here_and_added_there():
    moved = replace(MOMENT, lo=2, hi=4)
    verdict = identical((state(),), (state(optimizer=(moved, COUNTER)),))
    assert [(v.what[-15:], v.expected == "nothing", v.observed == "nothing") for v in verdict.violations] == [
        ("elements 0 to 1", False, True),
        ("elements 2 to 3", True, False),
    ]


def test_ranks_that_swapped_their_states():
    swapped = (replace(state(1), rank=0), replace(state(0), rank=1))
    verdict = identical((state(0), state(1)), swapped, ranks=2)
    assert {(violation.rank, violation.what) for violation in verdict.violations} == {
        (rank, f"loaded random generator {name}") for rank in (0, 1) for name in ("torch", "python")
    }


def test_the_worst_differs_most_in_norm():
    near, far = replace(WEIGHT, digest="x", norm=1.5), replace(MOMENT, digest="y", norm=9.0)
    verdict = identical((state(),), (state(parameters=(near,), optimizer=(far, COUNTER)),))
    assert verdict.worst.observed == "bits y, float32, norm 9.0"


@pytest.mark.parametrize(("saved", "loaded"), [((), ()), ((0,), (0, 1)), ((0, 1), (1,))])
def test_a_rank_without_a_record_is_unknown(saved, loaded):
    assert identical(tuple(map(state, saved)), tuple(map(state, loaded)), ranks=2).status == "unknown"
