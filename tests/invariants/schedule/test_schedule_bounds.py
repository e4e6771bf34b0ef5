"""What stages and ranks hold at their peak: the bounds against a count, action by action."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Op, actions_of
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.formulas import in_flight_bound, rank_in_flight_bound


@st.composite
def sizes(draw, name, ranks, microbatches):
    """(ranks, microbatches, stages a rank) at which the family exists."""
    many = draw(st.integers(1, ranks))
    least = max(1, FAMILIES[name].least * many)
    return many, draw(st.integers(least, max(least, microbatches))), FAMILIES[name].virtual or draw(st.integers(1, 4))


def held(schedule):
    """Most microbatches held at once, by stage, and by rank where one on two stages counts twice."""
    stages, ranks = [0] * schedule.stages, []
    for row in schedule.rows():
        now, most = {}, 0
        for action in (action for cell in row for action in actions_of(cell)):
            step = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT_GRADIENT: -1}.get(action.op, 0)
            now[action.stage] = now.get(action.stage, 0) + step
            stages[action.stage] = max(stages[action.stage], now[action.stage])
            most = max(most, sum(now.values()))
        ranks.append(most)
    return stages, ranks


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_families_hold_what_their_bounds_say(name, data):
    ranks, microbatches, virtual = data.draw(sizes(name, 10, 40))
    by_stage, by_rank = held(generate(name, ranks, microbatches, virtual))
    bounds = [in_flight_bound(name, stage, ranks, microbatches, virtual) for stage in range(virtual * ranks)]
    assert by_stage == bounds
    assert by_rank == [rank_in_flight_bound(name, rank, ranks, microbatches, virtual) for rank in range(ranks)]


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_only_gpipe_holds_more_for_more_microbatches(name, data):
    ranks, _, virtual = data.draw(sizes(name, 16, 64))
    # Interleaved groups are of N to 2N-1 microbatches; from N * N on, of N or N+1.
    many = ranks * max(ranks, 4)
    for stage in range(virtual * ranks):
        few, more = (in_flight_bound(name, stage, ranks, times * many, virtual) for times in (1, 1000))
        assert more == (1000 * many if name == "gpipe" else few)


@given(ranks=st.integers(1, 12), rounds=st.integers(1, 4), virtual=st.integers(1, 5))
def test_interleaved_in_flight_where_ranks_divide_microbatches(ranks, rounds, virtual):
    for chunk, rank in product(range(virtual), range(ranks)):
        long = 2 * (virtual - 1 - chunk) * ranks + 2 * (ranks - 1 - rank) + 1
        two_groups = min(ranks, long) + min(ranks, max(0, long - virtual * ranks))
        bound = in_flight_bound("interleaved-1f1b", chunk * ranks + rank, ranks, rounds * ranks, virtual)
        assert bound == min(rounds * ranks, two_groups)


def test_in_flight_literally():
    assert [in_flight_bound("gpipe", stage, 4, 3) for stage in range(4)] == [3, 3, 3, 3]
    assert [in_flight_bound("1f1b", stage, 4, 3) for stage in range(4)] == [3, 3, 2, 1]
    assert [rank_in_flight_bound("interleaved-1f1b", rank, 4, 8) for rank in range(4)] == [7, 5, 3, 1]
    assert [in_flight_bound("zb-h2", stage, 4, 9) for stage in range(4)] == [7, 7, 7, 7]
    assert [in_flight_bound("zb-v", stage, 2, 9) for stage in range(4)] == [4, 3, 2, 1]
    assert [rank_in_flight_bound("dualpipe-v", rank, 4, 9) for rank in range(4)] == [9, 9, 9, 9]


def test_places_that_are_not_there_are_refused():
    with pytest.raises(UsageError, match="microbatches=0"):
        in_flight_bound("1f1b", 0, 2, 0)
    with pytest.raises(UsageError, match="stage=2: expected 0 to 1"):
        in_flight_bound("1f1b", 2, 2, 2)
    with pytest.raises(UsageError, match="rank=2: expected 0 to 1"):
        rank_in_flight_bound("zb-v", 2, 2, 2)
