"""What stages and ranks hold, at their peak and over time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Op, actions_of, parse_rows
from invariants.schedule.activations import curve, in_flight, peaks
from invariants.schedule.compiled import OFF, available
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.table import Schedule
from invariants.schedule.timeline import simulate

CLOSE = (Op.BACKWARD, Op.WEIGHT_GRADIENT)


@pytest.fixture(params=["compiled", "numpy"])
def way(request, monkeypatch):
    """Both ways to the same answers."""
    if request.param == "numpy":
        monkeypatch.setenv(OFF, "1")
    else:
        assert available(), "numba belongs to the development environment"


def read(*rows):
    return parse_rows(row.split() for row in rows)


@pytest.mark.usefixtures("way")
def test_a_forward_opens_and_a_backward_closes():
    assert in_flight(read("0F0 0F1 0B0 0F2 0B1 0B2")) == {0: 2}


@pytest.mark.usefixtures("way")
def test_a_split_backward_holds_until_the_weight_gradient():
    assert in_flight(read("0F0 0I0 0F1 0I1 0W0 0W1")) == {0: 2}
    assert in_flight(read("0F0 0I0 0W0 0F1 0I1 0W1")) == {0: 1}


@pytest.mark.usefixtures("way")
def test_stages_of_one_rank_count_apart_and_their_rank_counts_both():
    rows = read("0F0 0F1 2F0 2B0 0B0 0B1", "1F0 1B0", "")
    assert in_flight(rows) == {0: 2, 2: 1, 1: 1}
    most = peaks(rows, Costs(activation_bytes=[10, 100, 1000]))
    assert most.rank.tolist() == [3, 1, 0]
    assert most.stage_bytes.tolist() == [20, 100, 1000]
    assert most.rank_bytes.tolist() == [1020, 100, 0]


@pytest.mark.usefixtures("way")
def test_the_peak_in_bytes_need_not_be_the_peak_in_microbatches():
    most = peaks(read("0F0 0F1 0F2 0B0 0B1 1F0"), Costs(activation_bytes=[1, 7]))
    assert (most.rank.tolist(), most.rank_bytes.tolist()) == ([3], [8])


@pytest.mark.usefixtures("way")
def test_a_microbatch_that_is_never_closed_stays():
    assert in_flight(read("0F0 0F1 0B1 0F2 0B2")) == {0: 2}


@pytest.mark.usefixtures("way")
def test_a_compound_cell_opens_before_it_closes():
    assert in_flight(read("0F0 (0F1;0B0)OVERLAP_F_B 0B1")) == {0: 2}
    assert in_flight(read("0F0 (0B0;0F1)OVERLAP_F_B 0B1")) == {0: 2}
    assert in_flight(read("0F0 0B0 0F1 0B1")) == {0: 1}


@pytest.mark.usefixtures("way")
def test_nothing_holds_nothing():
    assert in_flight(()) == {}
    assert in_flight(read("0B0 0W0")) == {}
    assert peaks(read("", "1F0")).rank.tolist() == [0, 1]
    assert peaks(read("0F0")).rank_bytes is None


COMPUTATION = st.builds("{}{}{}".format, st.integers(0, 1), st.sampled_from("FFIWB"), st.integers(0, 2))
CELL = COMPUTATION | st.lists(COMPUTATION, min_size=2, max_size=3).map(lambda parts: f"({';'.join(parts)})OVERLAP_F_B")


def held_by_sets(row, sizes):
    """Peaks of one rank by stage, in all and in bytes, from sets of what is held."""
    held, stages, rank, weight = set(), {}, 0, 0
    for cell in row:
        here = actions_of(cell)
        held |= {(action.stage, action.microbatch) for action in here if action.op is Op.FORWARD}
        for stage, _ in held:
            stages[stage] = max(stages.get(stage, 0), sum(other == stage for other, _ in held))
        rank, weight = max(rank, len(held)), max(weight, sum(sizes[stage] for stage, _ in held))
        held -= {(action.stage, action.microbatch) for action in here if action.op in CLOSE}
    return stages, rank, weight


@pytest.mark.usefixtures("way")
@given(st.lists(CELL, max_size=12), st.lists(st.integers(0, 2**40), min_size=2, max_size=2))
def test_peaks_of_any_row_are_those_of_sets(cells, sizes):
    rows = read("", " ".join(cells))
    schedule = Schedule.of_rows(rows)
    costs = Costs(activation_bytes=sizes[: schedule.stages])
    stages, rank, weight = held_by_sets(rows[1], sizes)
    most = peaks(schedule, costs)
    assert in_flight(schedule) == stages
    assert (most.rank.tolist(), most.rank_bytes.tolist()) == ([0, rank], [0, weight])


@st.composite
def family_members(draw):
    name = draw(st.sampled_from(list(FAMILIES)))
    ranks, virtual = draw(st.integers(1, 5)), FAMILIES[name].virtual or draw(st.integers(1, 3))
    least = max(1, FAMILIES[name].least * ranks)
    return generate(name, ranks, draw(st.integers(least, least + 8)), virtual)


@pytest.mark.usefixtures("way")
@given(family_members(), st.data())
def test_the_curve_has_the_peak_and_ends_with_nothing(schedule, data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=schedule.stages, max_size=schedule.stages))
    timeline = simulate(schedule, Costs(data.draw(st.integers(0, 3)), activation_bytes=sizes, latency=1))
    most = peaks(schedule, timeline.costs)
    for rank in range(schedule.ranks):
        over_time = curve(timeline, rank)
        assert over_time.microbatches.max() == most.rank[rank]
        assert over_time.bytes.max() == most.rank_bytes[rank]
        assert over_time.microbatches[[0, -1]].tolist() == over_time.bytes[[0, -1]].tolist() == [0, 0]
        assert (np.diff(over_time.times) >= 0).all()
        stages = np.flatnonzero(schedule.placement == rank)
        apart = [curve(timeline, rank, stage) for stage in stages]
        assert [one.microbatches.max() for one in apart] == most.stage[stages].tolist()
        assert sum(map(area, apart)) == area(over_time)


def area(over_time):
    """Microbatches times ticks."""
    return int((np.diff(over_time.times) * over_time.microbatches[:-1]).sum())


def test_a_curve_literally():
    timeline = simulate(generate("1f1b", 2, 2), Costs(activation_bytes=[5, 7]))
    first = curve(timeline, 0)
    assert first.times.tolist() == [0, 0, 1, 6, 9]
    assert first.microbatches.tolist() == [0, 1, 2, 1, 0]
    assert first.bytes.tolist() == [0, 5, 10, 5, 0]
    assert curve(timeline, 1).times.tolist() == [0, 1, 4, 4, 7]
    assert curve(simulate(generate("1f1b", 2, 2)), 1).bytes is None


def test_a_rank_that_does_not_exist_is_refused():
    timeline = simulate(read("0F0"))
    for rank in (-1, 1):
        with pytest.raises(UsageError, match=f"rank={rank}: expected 0 to 0"):
            curve(timeline, rank)


@given(family_members())
def test_ranks_hold_at_least_their_largest_stage_and_at_most_all(schedule):
    most = peaks(schedule)
    for rank in range(schedule.ranks):
        mine = most.stage[schedule.placement == rank]
        assert mine.max() <= most.rank[rank] <= mine.sum()
