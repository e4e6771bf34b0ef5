"""What one pass tells of right schedules, held against the tables and the network of waits that find what is wrong."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from invariants.schedule.actions import parse_rows
from invariants.schedule.compiled import OFF, available
from invariants.schedule.completeness import complete
from invariants.schedule.drawn import mutated_schedules, schedules
from invariants.schedule.families import generate
from invariants.schedule.flawless import flawless
from invariants.schedule.lowering import lower
from invariants.schedule.order import ends, evaluate
from invariants.schedule.rendezvous import all_meet
from invariants.schedule.table import Schedule

anything = st.one_of(schedules(), mutated_schedules().map(lambda mutated: mutated.schedule))
compiles = pytest.mark.skipif(not available(), reason="nothing is compiled here")


def without_numba(function, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OFF, "1")
        assert not available()
        return function(*args)


def afresh(schedule):
    return Schedule(*schedule.columns)


@given(anything, st.sampled_from([(0, 0)] * 3 + [(0, 1), (1, 0), (0, -1), (-1, 0)]), st.sampled_from([0, 0, 1, 2]))
def test_the_same_problems_are_found_with_and_without_it(schedule, more, first_trained):
    stages, microbatches = max(schedule.stages + more[0], 0), max(schedule.microbatches + more[1], 0)
    found = complete(afresh(schedule), stages, microbatches, first_trained)
    assert found == without_numba(complete, afresh(schedule), stages, microbatches, first_trained)


@compiles
@given(schedules())
def test_right_schedules_without_compound_cells_are_told(schedule):
    assert flawless(schedule, schedule.stages, schedule.microbatches) == (not schedule.joint.any())


@compiles
@given(mutated_schedules().map(lambda mutated: mutated.schedule))
def test_it_is_never_told_of_a_wrong_one(schedule):
    if flawless(schedule, schedule.stages, schedule.microbatches):
        assert without_numba(complete, schedule, schedule.stages, schedule.microbatches) == []


@compiles
@given(anything)
def test_all_meet_where_the_network_ends_and_nothing_is_swapped(schedule):
    assume(not any("computes on rank" in problem for problem in complete(schedule, 99, 99)))
    outcome = without_numba(evaluate, afresh(schedule), "blocking")
    batched = bool(schedule.joint[schedule.exchanges].any())
    assert all_meet(schedule) == (outcome.finished and not outcome.mismatches and not batched)
    assert evaluate(schedule, "blocking") == outcome
    assert ends(schedule, "blocking") == outcome.finished


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([["0F0", "0B0", "0SEND_F0"], ["1RECV_F0", "1F0", "1B0"]], "1B0 of rank 1: 0RECV_B0 is missing"),
        ([["0F0", "0SEND_F0", "0B0", "0RECV_B0"], ["1F0", "1RECV_F0", "1B0", "1SEND_B0"]], "1F0 at rank 1, column 0"),
        ([["0F0", "0B0"], ["1SEND_F0", "1F0", "1B0"]], "there is no stage 2"),
        ([["0F0", "1F0", "0B0", "1B0"]], "0B0 at rank 0, column 2 comes before 1B0"),
        ([["1F0", "0F0", "1B0", "0B0"]], "1F0 at rank 0, column 0 comes before 0F0"),
        ([["0F0", "1F0", "1W0", "1I0", "0B0"]], "1W0 at rank 0, column 2 comes before 1I0"),
        ([["0F0", "1F0", "1I0", "0B0"]], "1W0 is missing"),
        ([["0F0", "1F0", "1B0", "1W0", "0B0"]], "is done again by 1W0"),
        ([["0F0", "0B0"], ["1F0", "1B0", "0UNSHARD"]], "stage 0 computes on rank 0"),
    ],
)
def test_each_kind_of_problem_is_left_to_be_named(rows, problem):
    schedule = Schedule.of_rows(parse_rows(rows))
    assert not flawless(schedule, 2, 1)
    assert any(problem in sentence for sentence in complete(schedule, 2, 1))


def test_a_message_that_leads_out_of_the_pipeline_meets_nobody():
    outside = Schedule.of_arrays([2, 2], [4, 0, 5, 0], [-1, 1, 0, 0], [0, 0, 0, 0])
    assert not all_meet(outside)
    assert not evaluate(outside, "blocking").finished


def test_what_lowering_keeps_is_what_would_be_found():
    lowered = lower(generate("interleaved-1f1b", 3, 6, 2), "receive-first")
    assert np.array_equal(lowered.placement, afresh(lowered).placement)
