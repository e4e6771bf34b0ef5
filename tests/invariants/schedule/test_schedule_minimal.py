"""The smallest part that deadlocks: that it does, and that nothing more can be left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import parse_rows
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower
from invariants.schedule.minimal import smallest
from invariants.schedule.order import ends, evaluate, sticks
from invariants.schedule.table import Schedule


def texts(schedule):
    return [" ".join(map(str, row)) for row in schedule.rows()]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (5, 9), (16, 40)])
def test_textbook_1f1b_is_two_ranks_and_two_microbatches(stages, microbatches):
    part = smallest(lower(generate("1f1b", stages, microbatches), "textbook"), "blocking")
    assert part.ranks == 2
    assert len(set(part.microbatch.tolist())) == 2
    assert not evaluate(part, "blocking").finished


def test_a_ring_needs_all_its_ranks():
    ring = [
        ["0F2", "0SEND_F2", "3RECV_F0", "3F0", "0F7"],
        ["1F1", "1SEND_F1", "1RECV_F2", "1F2"],
        ["2F0", "2SEND_F0", "2RECV_F1", "2F1"],
        ["4F0"],
    ]
    expected = [" ".join(ring[0][:-1]), " ".join(ring[1]), " ".join(ring[2])]
    assert texts(smallest(Schedule.of_rows(parse_rows(ring)), "blocking")) == expected


def test_a_ring_stays_a_ring_where_only_another_microbatch_tells_who_computes_its_stages():
    ranks = 5
    base = lower(generate("interleaved-1f1b", ranks, 9, 2), "in-order").rows()
    first = [f"{rank}F9 {rank}SEND_F9 {rank or ranks}RECV_F9".split() for rank in range(ranks)]
    rows = [(*row, *rest) for row, rest in zip(parse_rows(first), base, strict=True)]
    part = smallest(Schedule.of_rows(rows), "blocking")
    assert part.ranks == ranks
    assert len(set(part.microbatch.tolist())) == 2
    assert len(evaluate(part, "blocking").cycle) == ranks


@given(st.data(), st.integers(2, 5), st.integers(2, 6), st.sampled_from(["blocking", "nccl-lazy", "nccl-eager"]))
def test_nothing_more_can_be_left_out(data, stages, microbatches, transport):
    name = data.draw(st.sampled_from(["1f1b", "zb-h1", "zb-h2", "interleaved-1f1b"]))
    schedule = lower(generate(name, stages, microbatches), data.draw(st.sampled_from(["textbook", "batched"])))
    if ends(schedule, transport):
        with pytest.raises(UsageError, match="expected one that does not"):
            smallest(schedule, transport)
        return
    part = smallest(schedule, transport)
    assert not ends(part, transport)
    numbers = sorted(set(part.microbatch.tolist()))
    for number in numbers:
        rows = [[cell for cell in row if number not in microbatches_of(cell)] for row in part.rows()]
        assert sticks(Schedule.of_rows(map(tuple, rows)), transport) != sticks(schedule, transport)


def microbatches_of(cell):
    return {action.microbatch for action in getattr(cell, "actions", (cell,))}


def test_a_message_that_nobody_takes_is_shown_alone():
    rows = parse_rows([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0", "1F1"], ["2F0"]])
    assert texts(smallest(Schedule.of_rows(rows), "blocking")) == ["0F1 0SEND_F1", "1F1"]
