"""What a makespan is bound by: chains that add up to it, and their sentences."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.schedule.actions import parse_rows
from invariants.schedule.costs import Costs
from invariants.schedule.critical import critical_path
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.timeline import simulate

COST = st.fractions(0, 5, max_denominator=3)


def read(*rows):
    return parse_rows(row.split() for row in rows)


@st.composite
def timelines(draw, exact=True):
    name = draw(st.sampled_from(list(FAMILIES)))
    ranks, virtual = draw(st.integers(1, 4)), FAMILIES[name].virtual or draw(st.integers(1, 2))
    least = max(1, FAMILIES[name].least * ranks)
    schedule = generate(name, ranks, draw(st.integers(least, least + 5)), virtual)
    per_stage = st.lists(COST, min_size=schedule.stages, max_size=schedule.stages)
    slow = draw(st.booleans())
    costs = Costs(
        draw(per_stage),
        draw(per_stage),
        draw(per_stage),
        overlapped=draw(st.none() | per_stage),
        latency=draw(COST) if exact else Fraction(1, 10**25),
        bandwidth=draw(st.fractions(Fraction(1, 3), 3, max_denominator=3)) if slow else None,
        message_bytes=draw(per_stage) if slow else None,
        overlap=draw(st.booleans()),
    )
    return simulate(schedule, costs)


@given(timelines())
def test_a_path_takes_all_of_the_makespan(timeline):
    path = critical_path(timeline)
    computes, waits = sum(path.compute.values()), sum(path.wait.values())
    assert computes + waits == timeline.makespan
    taken = timeline.end[path.steps] - timeline.start[path.steps]
    assert timeline.time(taken.sum()) == computes
    assert timeline.start[path.steps[0]] == 0
    assert timeline.time(timeline.end[path.steps[-1]]) == timeline.makespan
    for one, other in pairwise(path.steps):
        assert timeline.end[one] <= timeline.start[other]
    assert min([*path.compute.values(), *path.wait.values()]) >= 0


@given(timelines(), st.data())
def test_a_path_binds(timeline, data):
    """Whatever is on the path delays the end if it takes longer, by once for each time that it is on it or more."""
    path, costs = critical_path(timeline), timeline.costs
    slower = [1 + data.draw(st.integers(0, 3)) for _ in range(timeline.schedule.stages)]

    def scaled(times):
        return [time * factor for time, factor in zip(times, slower, strict=True)]

    pair = None if costs.overlapped is None else scaled(costs.overlapped)
    longer = Costs(
        *map(scaled, (costs.forward, costs.input_gradient, costs.weight_gradient)),
        overlapped=pair,
        latency=costs.latency,
        bandwidth=costs.bandwidth,
        message_bytes=costs.message_bytes,
        overlap=costs.overlap,
    )
    least = sum(path.wait.values()) + sum(
        time * min(slower[on] for on in stages) for stages, time in path.compute.items()
    )
    assert simulate(timeline.schedule, longer).makespan >= least


@given(timelines(exact=False))
def test_rounded_times_add_up_to_rounding(timeline):
    path = critical_path(timeline)
    total = float(sum(path.compute.values()) + sum(path.wait.values()))
    assert total == pytest.approx(float(timeline.makespan), rel=1e-9, abs=1e-20)


def test_a_slow_stage_binds_all():
    timeline = simulate(generate("1f1b", 4, 9), Costs([1, 1, 4, 1], [1, 1, 4, 1], [0, 0, 0, 0]))
    assert timeline.makespan == 76
    assert timeline.critical_path() == (
        "72 of 76 time units compute on stage 2",
        "2 compute on stage 0",
        "2 compute on stage 1",
    )


def test_a_slow_link_binds_all():
    timeline = simulate(read("0F0 0F1 0F2 0F3", "1F0 1F1 1F2 1F3"), Costs(1, bandwidth=2, message_bytes=20))
    assert timeline.critical_path() == (
        "40 of 42 time units wait on link 0->1",
        "1 compute on stage 0",
        "1 compute on stage 1",
    )


def test_a_transfer_that_keeps_its_sender_busy_is_a_wait_on_its_link():
    timeline = simulate(read("0F0 0F1", "1F0"), Costs(1, bandwidth=2, message_bytes=20, overlap=False))
    assert timeline.critical_path() == ("10 of 12 time units wait on link 0->1", "2 compute on stage 0")


def test_what_is_passed_once_is_summed_up():
    timeline = simulate(generate("1f1b", 6, 1), Costs([5, 4, 3, 2, 1, 1], 0, 0, latency=Fraction(1, 4)))
    assert timeline.critical_path() == (
        "5 of 18.5 time units compute on stage 0",
        "4 compute on stage 1",
        "3 compute on stage 2",
        "4 compute on 3 other stages",
        "2.5 wait on 10 other links",
    )


def test_overlapped_stages_are_named_together():
    timeline = simulate(read("0F0 3F0 (0F1;3B0)OVERLAP_F_B", "1F0 2F0 1F1"), Costs(overlapped=9))
    assert timeline.critical_path() == (
        "9 of 14 time units compute on stages 0 and 3",
        "2 compute on stage 1",
        "1 compute on stage 0",
        "2 compute on 2 other stages",
    )


def test_nothing_takes_no_time():
    for rows in ((), read("0F0")):
        assert simulate(rows, Costs(0)).critical_path() == ("nothing takes time",)
    assert critical_path(simulate(())).steps.dtype == np.int64
