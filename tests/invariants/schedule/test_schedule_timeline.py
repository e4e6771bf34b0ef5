"""When things run: literal timelines, a slow simulation of the same rules, and schedules that never end."""

from collections import defaultdict
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.schedule.actions import Action, Op, Overlap, actions_of, parse_rows
from invariants.schedule.compiled import OFF, available
from invariants.schedule.costs import Costs
from invariants.schedule.families import generate
from invariants.schedule.table import CODES, IDLE, Schedule
from invariants.schedule.timeline import NeverEnds, simulate

COST = st.fractions(0, 10, max_denominator=6)
BACKWARD = (Op.BACKWARD, Op.INPUT_GRADIENT)


@pytest.fixture(params=["compiled", "numpy"])
def way(request, monkeypatch):
    """Both ways to the same answers."""
    if request.param == "numpy":
        monkeypatch.setenv(OFF, "1")
    else:
        assert available(), "numba belongs to the development environment"


@contextmanager
def numpy_only():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OFF, "1")
        yield


def read(*rows):
    return Schedule.of_rows(parse_rows(row.split() for row in rows))


def spans(timeline):
    """Text, start and end of each computation, one list a rank."""
    entries = [
        (str(timeline.schedule.action(int(index))), timeline.time(start), timeline.time(end))
        for index, start, end in zip(timeline.index, timeline.start, timeline.end, strict=True)
    ]
    return [entries[first:last] for first, last in pairwise(timeline.offsets)]


@st.composite
def right_schedules(draw, ranks=4, stages=5, microbatches=4):
    """Any order in which data exist, on any placement, split or not, some computations overlapped, some cells empty."""
    homes = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=stages))
    split = draw(st.sets(st.integers(0, len(homes) - 1)))
    count = draw(st.integers(1, microbatches))
    rows = [[] for _ in range(max(homes) + 1)]
    left = {
        Action(stage, op, microbatch)
        for stage in range(len(homes))
        for microbatch in range(count)
        for op in (Op.FORWARD, *([Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT] if stage in split else [Op.BACKWARD]))
    }
    while left:
        ready = sorted((action for action in left if not left & set(needs(action, len(homes)))), key=str)
        one = draw(st.sampled_from(ready))
        together = [action for action in ready if action != one and homes[action.stage] == homes[one.stage]]
        other = draw(st.sampled_from([None, *together]))
        rows[homes[one.stage]].append(one if other is None else Overlap((one, other)))
        left -= {one, other}
    return Schedule.of_rows(map(tuple, rows))


def needs(action, stages):
    """The results that a computation needs, either of a full backward and an input gradient."""
    forward = [Action(action.stage, Op.FORWARD, action.microbatch)]
    if action.op is Op.FORWARD:
        return [Action(action.stage - 1, Op.FORWARD, action.microbatch)] if action.stage else []
    if action.op is Op.WEIGHT_GRADIENT:
        return [Action(action.stage, Op.INPUT_GRADIENT, action.microbatch)]
    later = [Action(action.stage + 1, op, action.microbatch) for op in BACKWARD] if action.stage < stages - 1 else []
    return forward + later


@st.composite
def drawn_costs(draw, schedule):
    def per_stage():
        return draw(COST | st.lists(COST, min_size=schedule.stages, max_size=schedule.stages))

    pairs = [(one, other) for one in range(schedule.ranks) for other in range(schedule.ranks)]
    speed = st.fractions(Fraction(1, 4), 4, max_denominator=4)
    slow = draw(st.booleans())
    return Costs(
        forward=per_stage(),
        input_gradient=per_stage(),
        weight_gradient=per_stage(),
        overlapped=per_stage() if draw(st.booleans()) else None,
        latency=draw(st.sampled_from([0, Fraction(1, 3), {pair: i % 4 for i, pair in enumerate(pairs)}])),
        bandwidth=draw(speed | st.fixed_dictionaries(dict.fromkeys(pairs, speed))) if slow else None,
        message_bytes=per_stage() if slow else None,
        overlap=draw(st.booleans()),
    )


class Slow:
    """The rules of `simulate`, one event after another, on dictionaries of fractions."""

    def __init__(self, schedule, costs):
        self.costs, self.stages = costs, schedule.stages
        self.home = {stage: int(rank) for stage, rank in enumerate(schedule.placement)}
        self.planned = {action for row in schedule.rows() for cell in row for action in actions_of(cell)}
        self.end, self.arrived = {}, {}
        self.link_free, self.rank_free = defaultdict(Fraction), defaultdict(Fraction)
        self.spans = [[] for _ in range(schedule.ranks)]
        queues = [[cell for cell in row if actions_of(cell)[0].op.computes] for row in schedule.rows()]
        while any(queues):
            moved = False
            for rank, queue in enumerate(queues):
                if queue and all(map(self.known, actions_of(queue[0]))):
                    self.do(rank, actions_of(queue.pop(0)))
                    moved = True
            if not moved:
                raise NeverEnds

    def known(self, action):
        wanted = needs(action, self.stages)
        return all(any(need in self.arrived for need in self.same(need)) for need in wanted)

    def same(self, need):
        return [Action(need.stage, op, need.microbatch) for op in (BACKWARD if need.op in BACKWARD else [need.op])]

    def of_stage(self, value, stage):
        return value[stage] if isinstance(value, tuple) else value

    def price(self, action):
        forward, inputs, weights = (
            self.of_stage(value, action.stage)
            for value in (self.costs.forward, self.costs.input_gradient, self.costs.weight_gradient)
        )
        return {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}[action.op.value]

    def do(self, rank, actions):
        wanted = [(action, need) for action in actions for need in needs(action, self.stages) if need in self.arrived]
        times = [(self.end if need.stage == action.stage else self.arrived)[need] for action, need in wanted]
        start = max([self.rank_free[rank], *times])
        time = sum(map(self.price, actions))
        if len(actions) > 1 and self.costs.overlapped is not None:
            time = self.of_stage(self.costs.overlapped, actions[0].stage)
        self.rank_free[rank] = end = start + time
        for action in actions:
            self.spans[rank].append((str(action), start, end))
            self.end[action], self.arrived[action] = end, max(end, self.send(rank, action))

    def send(self, rank, action):
        to = action.stage + (1 if action.op is Op.FORWARD else -1)
        used = [Op.FORWARD] if action.op is Op.FORWARD else BACKWARD
        wanted = any(other.stage == to and other.op in used for other in self.planned)
        if action.op is Op.WEIGHT_GRADIENT or not wanted or self.home[to] == rank:
            return Fraction()
        link, transfer = (rank, self.home[to]), Fraction()
        if self.costs.bandwidth is not None:
            speed = self.costs.bandwidth
            size = self.of_stage(self.costs.message_bytes, min(to, action.stage))
            transfer = size / (speed[link] if isinstance(speed, dict) else speed)
        self.link_free[link] = sent = max(self.rank_free[rank], self.link_free[link]) + transfer
        if not self.costs.overlap:
            self.rank_free[rank] = sent
        latency = self.costs.latency
        return sent + (latency[link] if isinstance(latency, dict) else latency)


@pytest.mark.usefixtures("way")
@given(data=st.data(), schedule=right_schedules())
def test_times_are_those_of_the_slow_simulation(data, schedule):
    costs = data.draw(drawn_costs(schedule))
    timeline = simulate(schedule, costs)
    slow = Slow(schedule, costs).spans
    assert timeline.exact
    assert spans(timeline) == slow
    ends = [entries[-1][2] if entries else 0 for entries in slow]
    starts = [entries[0][1] if entries else 0 for entries in slow]
    assert timeline.makespan == max(ends)
    assert timeline.span == tuple(end - start for start, end in zip(starts, ends, strict=True))
    busy = [sum(last - first for first, last in {entry[1:] for entry in entries}) for entries in slow]
    assert timeline.busy == tuple(busy)
    assert timeline.own_idle == tuple(span - work for span, work in zip(timeline.span, busy, strict=True))
    assert all(0 <= share <= 1 for share in timeline.idle_share)


@given(data=st.data(), schedule=right_schedules())
def test_costs_that_do_not_fit_are_rounded_the_same_both_ways(data, schedule):
    third, tiny = 1 / 3, Fraction(1, 10**25)
    costs = Costs(third, data.draw(st.floats(0, 1e3)), tiny, latency=0.1, bandwidth=0.3, message_bytes=1)
    compiled = simulate(schedule, costs)
    with numpy_only():
        waves = simulate(schedule, costs)
    assert not compiled.exact
    assert compiled.start.dtype == np.float64
    for one, other in zip([compiled.start, *compiled.trace], [waves.start, *waves.trace], strict=True):
        assert np.array_equal(one, other)
    exact = max(end for entries in Slow(schedule, costs).spans for _, _, end in entries)
    assert float(compiled.makespan) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.usefixtures("way")
def test_1f1b_literally():
    timeline = simulate(generate("1f1b", 2, 2))
    assert spans(timeline) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    ]
    assert timeline.makespan == 9
    assert timeline.busy == (6, 6)
    assert timeline.idle_share == (Fraction(1, 3), Fraction(1, 3))
    assert timeline.span == (9, 6)
    assert timeline.own_idle == (3, 0)


@pytest.mark.usefixtures("way")
def test_a_message_arrives_after_latency_and_transfer_and_the_next_one_waits_for_the_link():
    rows = read("0F0 0F1", "1F0 1F1")
    late = Costs(1, latency=10, bandwidth=2, message_bytes=8)
    assert spans(simulate(rows, late))[1] == [("1F0", 15, 16), ("1F1", 19, 20)]


@pytest.mark.usefixtures("way")
def test_what_is_sent_away_is_there_at_once_for_its_own_stage():
    rows = read("0F0 0I0 0W0", "1F0 1I0 1W0")
    assert spans(simulate(rows, Costs(latency=10)))[1] == [("1F0", 11, 12), ("1I0", 12, 13), ("1W0", 13, 14)]


@pytest.mark.usefixtures("way")
def test_without_overlap_a_transfer_keeps_its_sender_busy_and_no_one_else():
    rows = read("0F0 0F1", "1F0 1F1")
    timeline = simulate(rows, Costs(1, latency=10, bandwidth=2, message_bytes=8, overlap=False))
    assert spans(timeline) == [[("0F0", 0, 1), ("0F1", 5, 6)], [("1F0", 15, 16), ("1F1", 20, 21)]]
    assert timeline.busy == (2, 2)


@pytest.mark.usefixtures("way")
def test_overlapped_computations_start_and_end_together():
    rows = read("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")
    assert spans(simulate(rows))[0] == [("0F0", 0, 1), ("0F1", 4, 7), ("0B0", 4, 7), ("0B1", 10, 12)]
    faster = simulate(rows, Costs(overlapped=[2, 5]))
    assert spans(faster)[0][1:3] == [("0F1", 4, 6), ("0B0", 4, 6)]
    assert faster.busy == (5, 6)


@pytest.mark.usefixtures("way")
def test_thirds_and_decimals_stay_exact():
    assert simulate(generate("gpipe", 1, 3), Costs(Fraction(1, 3), Fraction(2, 3), 0)).makespan == 3
    assert simulate(generate("gpipe", 1, 3), Costs(0.1, 0.2, np.float64(0))).makespan == Fraction(9, 10)
    assert simulate(generate("gpipe", 1, 3), Costs(np.array([1e-3]), np.int32(1), 0)).makespan == Fraction(3003, 1000)


@pytest.mark.usefixtures("way")
def test_what_does_not_compute_costs_nothing_and_orders_nothing():
    rows = read("0UNSHARD 0F0 0SEND_F0 0RESHARD 0RECV_B0 0B0 0REDUCE_GRAD", "1B1 1RECV_F0 1F1")
    assert rows.computes.sum() == 4
    bare = read("0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0")
    lowered = read(
        "0UNSHARD (0RECV_B0;0SEND_F0)BATCH 0F0 0F1 0RESHARD 0B1 0B0 0REDUCE_GRAD 0REDUCE_GRAD",
        "(1SEND_B0)BATCH 1F1 1F0 1SEND_B1 1B1 1B0",
    )
    assert spans(simulate(lowered, Costs(latency=1))) == spans(simulate(bare, Costs(latency=1)))
    gaps = Schedule.of_arrays([4], [IDLE, CODES[Op.FORWARD], IDLE, CODES[Op.BACKWARD]], [-1, 0, -1, 0], [-1, 0, -1, 0])
    assert spans(simulate(gaps)) == [[("0F0", 0, 1), ("0B0", 1, 3)]]
    assert simulate(gaps).index.tolist() == [1, 3]


@pytest.mark.usefixtures("way")
def test_stages_that_share_a_rank_exchange_nothing():
    rows = read("0F0 2F0 2B0 0B0", "1F0 1B0")
    timeline = simulate(rows, Costs(1, 1, 0))
    assert timeline.makespan == 6
    assert timeline.idle_share == (Fraction(1, 3), Fraction(2, 3))
    assert simulate(read("0F0 1F0 1B0 0B0"), Costs(latency=100)).makespan == 6


@pytest.mark.usefixtures("way")
def test_the_first_of_two_results_is_used_and_both_take_time():
    timeline = simulate(read("0F0 0F0 0B0", "1F0 1B0"))
    assert spans(timeline) == [[("0F0", 0, 1), ("0F0", 1, 2), ("0B0", 4, 6)], [("1F0", 1, 2), ("1B0", 2, 4)]]


@pytest.mark.usefixtures("way")
def test_gradients_that_nobody_needs_are_not_sent():
    frozen = read("0F0 0F1", "1F0 1B0 1F1 1B1")
    held = simulate(frozen, Costs(bandwidth=1, message_bytes=[0, 50], overlap=False))
    assert spans(held) == spans(simulate(frozen))


@pytest.mark.usefixtures("way")
def test_nothing_to_do_takes_no_time():
    for nothing in ((), ((), ())):
        timeline = simulate(nothing)
        assert timeline.makespan == 0
        assert timeline.busy == timeline.idle_share == timeline.own_idle == (0,) * len(nothing)
    timeline = simulate(generate("gpipe", 2, 2), Costs(0, 0, 0))
    assert timeline.makespan == 0
    assert timeline.idle_share == (0, 0)
    assert simulate(read("0F0", "")).span == (1, 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0B0 0F0",), "rank 0 waits at 0B0 for 0F0"),
        (("0F0 0W0 0I0",), "rank 0 waits at 0W0 for 0I0"),
        (("(0F0;0B0)OVERLAP_F_B",), "rank 0 waits at 0B0 for 0F0"),
        (("0F0 0B0", "1F0"), "rank 0 waits at 0B0 for 1B0"),
        (("0F0 0B0", "1F0 1I1"), "rank 0 waits at 0B0 for 1B0; 1 more wait"),
        (("0F0 0I0", "1F0"), "rank 0 waits at 0I0 for 1I0"),
        (("0F0 0I0", "1B0 1F0"), "rank 0 waits at 0I0 for 1B0; 1 more wait"),
        (("", "1F0"), "rank 1 waits at 1F0 for 0F0"),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "rank 0 waits at 0B0 for 1B0; 1 more wait"),
    ],
)
def test_a_schedule_that_never_ends_says_who_waits(rows, message):
    with pytest.raises(NeverEnds, match=f"^schedule never ends: {message}$"):
        simulate(read(*rows))


@pytest.mark.usefixtures("way")
@given(schedule=right_schedules(), data=st.data())
def test_a_schedule_ends_where_the_slow_simulation_does(schedule, data):
    rows = [list(row) for row in schedule.rows()]
    row = rows[data.draw(st.integers(0, len(rows) - 1))]
    if row:
        row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(data.draw(st.integers(0, len(row) - 1))))
    mutated = Schedule.of_rows(map(tuple, rows))
    try:
        slow = Slow(mutated, Costs()).spans
    except NeverEnds:
        with pytest.raises(NeverEnds):
            simulate(mutated)
    else:
        assert spans(simulate(mutated)) == slow
