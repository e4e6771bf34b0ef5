"""What is wrong with rows, in sentences; nothing is said of right ones, and every wrong line is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Op, parse_rows
from invariants.schedule.completeness import complete
from invariants.schedule.families import generate
from invariants.schedule.lowering import LOWERINGS, lower


@st.composite
def lowered_rows(draw, least=1):
    """(rows, stages, microbatches) of a family, lowered in some way."""
    stages, microbatches = draw(st.integers(least, 4)), draw(st.integers(1, 4))
    rows = generate(draw(st.sampled_from(["gpipe", "1f1b"])), stages, microbatches)
    return lower(rows, draw(st.sampled_from(list(LOWERINGS)))).rows(), stages, microbatches


def changed(rows, rank, row):
    return (*rows[:rank], tuple(row), *rows[rank + 1 :])


@given(lowered=lowered_rows())
def test_right_rows_have_no_problem(lowered):
    assert complete(*lowered) == []


@given(data=st.data(), lowered=lowered_rows())
def test_any_cell_dropped_or_doubled_is_a_problem(data, lowered):
    rows, stages, microbatches = lowered
    rank = data.draw(st.integers(0, stages - 1))
    column = data.draw(st.integers(0, len(rows[rank]) - 1))
    row = list(rows[rank])
    assert complete(changed(rows, rank, row[:column] + row[column + 1 :]), stages, microbatches)
    assert complete(changed(rows, rank, [*row[:column], row[column], *row[column:]]), stages, microbatches)


@given(data=st.data(), lowered=lowered_rows(least=2))
def test_any_cell_on_another_rank_is_a_problem(data, lowered):
    rows, stages, microbatches = lowered
    rank, other = data.draw(st.permutations(range(stages)))[:2]
    column = data.draw(st.integers(0, len(rows[rank]) - 1))
    row = list(rows[rank])
    moved = changed(changed(rows, other, (*rows[other], row.pop(column))), rank, row)
    assert complete(moved, stages, microbatches)


@given(data=st.data(), lowered=lowered_rows())
def test_a_backward_before_its_forward_is_a_problem(data, lowered):
    rows, stages, microbatches = lowered
    rank, microbatch = data.draw(st.integers(0, stages - 1)), data.draw(st.integers(0, microbatches - 1))
    swap = {
        Action(rank, Op.FORWARD, microbatch): Action(rank, Op.BACKWARD, microbatch),
        Action(rank, Op.BACKWARD, microbatch): Action(rank, Op.FORWARD, microbatch),
    }
    row = [swap.get(cell, cell) for cell in rows[rank]]
    assert any(
        f"{rank}B{microbatch} at" in problem for problem in complete(changed(rows, rank, row), stages, microbatches)
    )


def test_no_gradient_need_reach_stages_that_are_not_trained():
    rows = parse_rows([["0F0", "0SEND_F0", "0B0"], ["1RECV_F0", "1F0", "1B0"]])
    assert complete(rows, 2, 1) == ["0B0 at rank 0, column 2 needs 1B0 of rank 1: 0RECV_B0 is missing"]
    assert complete(rows, 2, 1, first_trained=1) == []
    assert complete(parse_rows(LOWERED), 2, 1, first_trained=1) == [], "one that is sent all the same does no harm"


SPLIT = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
LOWERED = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]


@pytest.mark.parametrize("texts", [SPLIT, LOWERED, [["0F0", "1F0", "1B0", "0B0"]], [["1F0", "1B0"], ["0F0", "0B0"]]])
def test_right_literals(texts):
    assert complete(parse_rows(texts), 2, 1) == []


@pytest.mark.parametrize(
    ("texts", "problems"),
    [
        ([["0F0", "0B0"], ["1F0"]], ["1B0 is missing"]),
        ([["0F0", "0B0"], []], ["1F0 is missing", "1B0 is missing"]),
        ([["0F0", "0I0", "0W0"], ["1F0", "1I0"]], ["1W0 is missing"]),
        ([["0F0", "0I0", "0W0"], ["1F0", "1W0"]], ["1I0 is missing"]),
        ([["0F0", "0B0", "0W0"], SPLIT[1]], ["0B0 at rank 0, column 1 is done again by 0W0 at rank 0, column 2"]),
        ([["0F0", "0W0", "0I0"], SPLIT[1]], ["0W0 at rank 0, column 1 comes before 0I0 at rank 0, column 2"]),
        ([["0B0", "0F0"], ["1F0", "1B0"]], ["0B0 at rank 0, column 0 comes before 0F0 at rank 0, column 1"]),
        ([["1F0", "0F0", "1B0", "0B0"]], ["1F0 at rank 0, column 0 comes before 0F0 at rank 0, column 1"]),
        ([["0F0", "1F0", "0B0", "1B0"]], ["0B0 at rank 0, column 2 comes before 1B0 at rank 0, column 3"]),
        ([["0F0", "0F0", "0B0"], ["1F0", "1B0"]], ["0F0 occurs 2 times: rank 0, column 0; rank 0, column 1"]),
        ([["0F0", "0B0", "0F1"], ["1F0", "1B0"]], ["0F1 at rank 0, column 2: there is no microbatch 1"]),
        ([["0F0", "0B0"], ["1F0", "1B0", "7B0"]], ["7B0 at rank 1, column 2: there is no stage 7"]),
        ([["0F0"], ["1F0", "1B0", "0B0"]], ["0B0 at rank 1, column 2: stage 0 computes on rank 0"]),
        ([[*LOWERED[0], "0SEND_B0"], LOWERED[1]], ["0SEND_B0 at rank 0, column 4: there is no stage -1"]),
        ([LOWERED[0], LOWERED[1][:3]], ["0RECV_B0 at rank 0, column 2 has no 1SEND_B0"]),
        (
            [["0F0", "0RECV_B0", "0B0"], LOWERED[1][1:]],
            ["1F0 at rank 1, column 0 needs 0F0 of rank 0: 1RECV_F0 is missing"],
        ),
        (
            [["0SEND_F0", "0F0", "0RECV_B0", "0B0"], LOWERED[1]],
            ["0SEND_F0 at rank 0, column 0 comes before 0F0 at rank 0, column 1"],
        ),
        (
            [LOWERED[0], ["1F0", "1RECV_F0", "1B0", "1SEND_B0"]],
            ["1F0 at rank 1, column 0 comes before 1RECV_F0 at rank 1, column 1"],
        ),
        (
            [["0F0", "0RECV_B0", "0B0"], [*LOWERED[1], "0SEND_F0"]],
            ["0SEND_F0 at rank 1, column 4: stage 0 computes on rank 0"],
        ),
    ],
)
def test_wrong_literals(texts, problems):
    assert complete(parse_rows(texts), 2, 1) == problems


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 10**8), (10**8, 1), (10**5, 10**5), (10**12, 0)])
def test_sizes_that_the_actions_cannot_fill_are_refused_before_tables_are_made(stages, microbatches):
    with pytest.raises(UsageError, match=f"{stages} stages x {microbatches} microbatches, but 2 actions"):
        complete(parse_rows([["0F0", "0B0"]]), stages, microbatches)
