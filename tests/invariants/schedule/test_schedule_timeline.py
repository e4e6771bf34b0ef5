"""When things run: literal timelines, laws that hold for all, and schedules that never end."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Op, parse_rows
from invariants.schedule.families import generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.timeline import NeverEnds, simulate

ONE = [Fraction(1)]
COST = st.fractions(0, 10, max_denominator=6)


def read(*rows):
    return parse_rows(row.split() for row in rows)


def test_1f1b_literally():
    timeline = simulate(generate("1f1b", 2, 2), [1, 1], [2, 2])
    assert [[(str(span.action), span.start, span.end) for span in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    ]
    assert timeline.makespan == 9
    assert timeline.busy == (6, 6)
    assert timeline.idle_share == (Fraction(1, 3), Fraction(1, 3))


def test_thirds_stay_exact():
    assert simulate(generate("gpipe", 1, 3), [Fraction(1, 3)], [Fraction(2, 3)]).makespan == 3


@given(
    data=st.data(), name=st.sampled_from(["gpipe", "1f1b"]), stages=st.integers(1, 6), microbatches=st.integers(1, 10)
)
def test_laws_of_any_timeline(data, name, stages, microbatches):
    costs = st.lists(COST, min_size=stages, max_size=stages)
    forward, backward = data.draw(costs), data.draw(costs)
    rows = generate(name, stages, microbatches)
    timeline = simulate(rows, forward, backward)
    span = {span.action: span for spans in timeline.spans for span in spans}
    for action, here in span.items():
        needs = [Action(action.stage - 1, Op.FORWARD, action.microbatch)]
        if action.op is Op.BACKWARD:
            needs = [
                Action(action.stage, Op.FORWARD, action.microbatch),
                Action(action.stage + 1, action.op, action.microbatch),
            ]
        assert all(span[need].end <= here.start for need in needs if need in span)
    for rank, spans in enumerate(timeline.spans):
        assert tuple(span.action for span in spans) == rows.row(rank)
        assert all(before.end <= after.start for before, after in pairwise(spans))
        assert timeline.busy[rank] == microbatches * (forward[rank] + backward[rank])
    assert timeline.makespan == max(span.end for span in span.values())
    assert all(0 <= share <= 1 for share in timeline.idle_share)


@pytest.mark.parametrize("how", LOWERINGS)
def test_messages_cost_nothing_and_order_nothing(how):
    rows = generate("1f1b", 3, 4)
    assert simulate(lower(rows, how), [1, 2, 3], [3, 2, 1]) == simulate(rows, [1, 2, 3], [3, 2, 1])


def test_stages_that_share_a_rank():
    rows = read("0F0 2F0 2B0 0B0", "1F0 1B0")
    timeline = simulate(rows, [1, 1, 1], [1, 1, 1])
    assert timeline.makespan == 6
    assert timeline.idle_share == (Fraction(1, 3), Fraction(2, 3))


def test_nothing_to_do_takes_no_time():
    assert simulate((), [], []).makespan == 0
    timeline = simulate(generate("gpipe", 2, 2), [0, 0], [0, 0])
    assert timeline.makespan == 0
    assert timeline.idle_share == (0, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0B0 0F0",), "rank 0 waits at 0B0 for 0F0"),
        (("0F0 0B0", "1F0"), "rank 0 waits at 0B0 for 1B0"),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "rank 0 waits at 0B0 for 1B0; 1 more wait"),
    ],
)
def test_a_schedule_that_never_ends_says_who_waits(rows, message):
    with pytest.raises(NeverEnds, match=f"^schedule never ends: {message}$"):
        simulate(read(*rows), ONE * len(rows), ONE * len(rows))


def test_costs_that_do_not_fit_are_refused():
    rows = generate("gpipe", 2, 1)
    with pytest.raises(UsageError, match="1 costs of F for 2 stages"):
        simulate(rows, ONE, ONE * 2)
    with pytest.raises(UsageError, match="a cost of B is -1: expected 0 or more"):
        simulate(rows, ONE * 2, [Fraction(1), Fraction(-1)])
    with pytest.raises(UsageError, match="0I0: a split backward has no cost"):
        simulate(read("0F0 0I0 0W0"), ONE, ONE)
