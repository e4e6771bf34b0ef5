"""The text form of schedules, and what is read off rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Batch, Op, Overlap, parse_cell, parse_rows
from invariants.schedule.table import Schedule

STAGES, MICROBATCHES = st.integers(0, 4096), st.integers(0, 10**6)
COMPUTATIONS = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.computes]), MICROBATCHES)
MESSAGES = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.exchanges]), MICROBATCHES)
SHARDS = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.shards]))
CELLS = st.one_of(
    COMPUTATIONS,
    MESSAGES,
    SHARDS,
    st.builds(Batch, st.lists(MESSAGES, min_size=1, max_size=4).map(tuple)),
    st.builds(Overlap, st.lists(COMPUTATIONS, min_size=1, max_size=4).map(tuple)),
)


@given(rows=st.lists(st.lists(CELLS, max_size=5).map(tuple), max_size=3).map(tuple))
def test_a_round_trip_keeps_rows(rows):
    assert parse_rows([list(map(str, row)) for row in rows]) == rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "0F",
        "0X1",
        "0F0junk",
        "-1F0",
        "0 F0",
        "0f0",
        "0F0;1F0",
        "()BATCH",
        "(0SEND_F0)",
        "0UNSHARD1",
        "()OVERLAP_F_B",
    ],
)
def test_a_cell_that_is_not_exact_is_refused_by_its_text(text):
    with pytest.raises(UsageError, match="expected") as error:
        parse_cell(text)
    assert repr(text) in str(error.value)


def test_a_batch_holds_no_computation():
    with pytest.raises(UsageError, match="sends and receives only"):
        parse_cell("(0SEND_F0;0B1)BATCH")


def test_an_overlap_holds_computation_only():
    with pytest.raises(UsageError, match="computations only"):
        parse_cell("(0F0;0SEND_F0)OVERLAP_F_B")


def test_a_wrong_cell_is_named_by_rank_and_column():
    with pytest.raises(UsageError, match="rank 1, column 2: schedule cell '1Q0'"):
        parse_rows([["0F0"], ["1F0", "1F1", "1Q0"]])


@pytest.mark.parametrize(("text", "peer"), [("3SEND_F0", 4), ("3RECV_F0", 2), ("3SEND_B0", 2), ("3RECV_B0", 4)])
def test_activations_go_up_and_gradients_go_down(text, peer):
    action = parse_cell(text)
    assert isinstance(action, Action)
    assert action.peer == peer


def test_placement_follows_computation_alone():
    rows = parse_rows([["0F0", "0SEND_F0", "3F0"], ["(1RECV_F0;7SEND_B0)BATCH", "1F0"], []])
    assert Schedule.of_rows(rows).placement[[0, 3, 1]].tolist() == [0, 0, 1]
    assert set(Schedule.of_rows(rows).placement[[2, *range(4, 8)]].tolist()) == {-1}
    with pytest.raises(UsageError, match="stage 2 computes on rank 0 and on rank 2"):
        _ = Schedule.of_rows(parse_rows([["2F0"], [], ["2B0"]])).placement


def test_communicates_sees_plain_and_batched_messages():
    assert not Schedule.of_rows(parse_rows([["0F0", "0I0", "0W0"], ["1B0"]])).communicates
    assert Schedule.of_rows(parse_rows([["0F0"], ["1F0", "1RECV_B0"]])).communicates
    assert Schedule.of_rows(parse_rows([["0F0"], ["(1RECV_B0)BATCH"]])).communicates
