"""`Schedule`: rows to arrays and back, and what is read off the arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Batch, Op, Overlap, actions_of, parse_rows
from invariants.schedule.table import ALONE, CODES, FIRST, IDLE, NEXT, OPS, Schedule

STAGES, MICROBATCHES = st.integers(0, 64), st.integers(0, 10**6)
COMPUTATIONS = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.computes]), MICROBATCHES)
MESSAGES = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.exchanges]), MICROBATCHES)
CELLS = st.one_of(
    COMPUTATIONS,
    MESSAGES,
    st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.shards])),
    st.builds(Batch, st.lists(MESSAGES, min_size=1, max_size=4).map(tuple)),
    st.builds(Overlap, st.lists(COMPUTATIONS, min_size=1, max_size=4).map(tuple)),
)
ROWS = st.lists(st.lists(CELLS, max_size=5).map(tuple), max_size=4).map(tuple)


def placed(rows):
    """Each action with its rank."""
    return [(rank, action) for rank, row in enumerate(rows) for cell in row for action in actions_of(cell)]


@given(ROWS)
def test_rows_come_back_as_they_went_in(rows):
    schedule = Schedule.of_rows(rows)
    assert schedule.rows() == rows
    assert schedule == Schedule.of_rows(schedule.rows())
    assert schedule.communicates == any(action.op.exchanges for _, action in placed(rows))


@given(ROWS)
def test_masks_say_what_the_operations_say(rows):
    schedule = Schedule.of_rows(rows)
    for index in range(len(schedule)):
        action = schedule.action(index)
        assert schedule.computes[index] == action.op.computes
        assert schedule.exchanges[index] == action.op.exchanges
        rank, place = schedule.place(index)
        assert schedule.rank[index] == rank
        assert schedule.starts[rank] + place == index


def test_columns_are_those_of_the_cells():
    schedule = Schedule.of_rows(parse_rows([["0F0", "(0SEND_F0;0RECV_B1)BATCH"], [], ["0UNSHARD"]]))
    assert schedule.starts.tolist() == [0, 3, 3, 4]
    assert [OPS[code] for code in schedule.op] == [Op.FORWARD, Op.SEND_F, Op.RECV_B, Op.UNSHARD]
    assert schedule.microbatch.tolist() == [0, 0, 1, -1]
    assert schedule.joint.tolist() == [ALONE, FIRST, NEXT, ALONE]
    assert (schedule.ranks, schedule.stages, schedule.microbatches, len(schedule)) == (3, 1, 2, 4)


def test_nothing_at_all_is_a_schedule():
    for rows in ((), ((), ())):
        schedule = Schedule.of_rows(rows)
        assert (schedule.ranks, schedule.stages, schedule.microbatches) == (len(rows), 0, 0)
        assert schedule.placement.tolist() == []


def test_two_compounds_in_a_row_stay_two():
    rows = parse_rows([["(0SEND_F0)BATCH", "(0SEND_F1)BATCH", "(0F0;0B0)OVERLAP_F_B"]])
    assert Schedule.of_rows(rows).rows() == rows


def test_empty_cells_are_left_out_of_rows():
    schedule = Schedule.of_arrays([3], [IDLE, CODES[Op.FORWARD], IDLE], [-1, 0, -1], [-1, 0, -1])
    assert list(map(str, schedule.row(0))) == ["0F0"]


def test_schedules_differ_where_a_column_differs():
    one = Schedule.of_rows(parse_rows([["0F0", "0B0"]]))
    assert one != Schedule.of_rows(parse_rows([["0F0"], ["0B0"]]))
    assert one != Schedule.of_rows(parse_rows([["0F0", "0B1"]]))
    assert one != "0F0"


@given(ROWS)
def test_the_placement_is_that_of_the_rows(rows):
    schedule = Schedule.of_rows(rows)
    homes = {}
    for rank, action in placed(rows):
        if action.op.computes:
            homes.setdefault(action.stage, set()).add(rank)
    if any(len(ranks) > 1 for ranks in homes.values()):
        with pytest.raises(UsageError, match="expected one rank a stage"):
            _ = schedule.placement
    else:
        found = {int(stage): {int(schedule.placement[stage])} for stage in np.flatnonzero(schedule.placement >= 0)}
        assert found == homes


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([2], [0], [0], [0]), "starts"),
        (([1], [0], [0, 1], [0]), "differ in length"),
        (([2, -1], [0], [0], [0]), "starts"),
        (([1], [0], [2**31], [0]), "stage 2147483648"),
        (([1], [0], [0], [-2]), "microbatch -2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arrays, message):
    with pytest.raises(UsageError, match=message):
        Schedule.of_arrays(*arrays)
