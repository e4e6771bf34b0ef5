"""The closed forms against simulation, over their domains; and where published ones say something else."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Op, actions_of
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.formulas import (
    idle_share,
    makespan,
    makespan_bounds,
    makespan_idle,
    outside,
    own_idle,
)
from invariants.schedule.timeline import simulate

GRID = list(product(range(1, 9), range(1, 17)))
CORNERS = [*product(range(1, 7), range(1, 13)), (16, 1), (16, 15), (16, 16), (16, 31), (16, 33), (11, 64), (16, 64)]
COST = st.fractions(0, 10, max_denominator=6)
LITERAL = [Costs(1, 1, 1), Costs(2, 3, 1), Costs(1, 3, 2), Costs(3, 1, 2), Costs(1, 2, 3), Costs(3, 5, 2, 8)]


def slow(schedule, costs):
    """Start and end of each rank's cells, in order and after their data, until nothing moves any more."""
    rows, stages = [list(row) for row in schedule.rows()], schedule.stages
    took = {
        Op.FORWARD: costs.forward,
        Op.INPUT_GRADIENT: costs.input_gradient,
        Op.WEIGHT_GRADIENT: costs.weight_gradient,
        Op.BACKWARD: costs.input_gradient + costs.weight_gradient,
    }
    made, spans, moved = {}, [[] for _ in rows], True

    def needs(action):
        kind, stage = ("F", action.stage - 1) if action.op is Op.FORWARD else ("gradient", action.stage + 1)
        if action.op is Op.WEIGHT_GRADIENT:
            return [("gradient", action.stage, action.microbatch)]
        own = [] if action.op is Op.FORWARD else [("F", action.stage, action.microbatch)]
        return own + ([(kind, stage, action.microbatch)] if 0 <= stage < stages else [])

    while moved:
        moved = False
        for row, done in zip(rows, spans, strict=True):
            while len(done) < len(row):
                parts = actions_of(row[len(done)])
                wanted = [need for part in parts for need in needs(part)]
                if any(need not in made for need in wanted):
                    break
                start = max([made[need] for need in wanted] + [done[-1][1] if done else 0])
                time = sum(took[part.op] for part in parts)
                end = start + (time if len(parts) == 1 or costs.overlapped is None else costs.overlapped)
                done.append((start, end))
                for part in parts:
                    if part.op is not Op.WEIGHT_GRADIENT:
                        made["F" if part.op is Op.FORWARD else "gradient", part.stage, part.microbatch] = end
                moved = True
    assert [len(done) for done in spans] == [len(row) for row in rows]
    return spans


def measured(schedule, costs):
    """Makespan, rank 0's idle time in it, and the longest own span less its work: by the slow way."""
    spans = slow(schedule, costs)
    work = [sum(end - start for start, end in done) for done in spans]
    time = max(done[-1][1] for done in spans)
    own = max(done[-1][1] - done[0][0] - busy for done, busy in zip(spans, work, strict=True))
    return time, time - work[0], own


def claimed(name, ranks, microbatches, virtual, costs):
    """The same three by the formulas."""
    return tuple(formula(name, ranks, microbatches, virtual, costs) for formula in (makespan, makespan_idle, own_idle))


@st.composite
def sizes(draw, name, ranks=16, microbatches=64, virtual=4):
    """(ranks, microbatches, stages a rank) at which the family exists."""
    many = draw(st.integers(1, ranks))
    least = max(1, FAMILIES[name].least * many)
    v = draw(st.integers(1, virtual)) if FAMILIES[name].virtual is None else FAMILIES[name].virtual
    return many, draw(st.integers(least, max(least, microbatches))), v


@st.composite
def costs_within(draw, name):
    """Costs at which the family has a closed form, often with some of them equal."""
    few = draw(st.lists(COST, min_size=3, max_size=3) | st.lists(st.sampled_from([0, 1, 2, 3]), min_size=3, max_size=3))
    if name == "zb-v":
        weights, forward, inputs = sorted(few)
        return Costs(forward, inputs, weights)
    if name == "dualpipe-v":
        forward, (weights, inputs) = few[0], sorted(few[1:])
        longer = max(forward, inputs + weights)
        pair = draw(st.sampled_from([None, longer, forward + inputs + weights]) | COST.map(lambda more: longer + more))
        return Costs(forward, inputs, weights, pair)
    return Costs(*few)


@pytest.mark.parametrize("name", FAMILIES)
def test_formulas_at_the_corners_of_their_domain(name):
    held = 0
    for (ranks, microbatches), costs in product(CORNERS, LITERAL):
        for virtual in (1, 2, 3) if FAMILIES[name].virtual is None else (FAMILIES[name].virtual,):
            if microbatches < FAMILIES[name].least * ranks or outside(name, ranks, microbatches, virtual, costs):
                continue
            line = simulate(generate(name, ranks, microbatches, virtual), costs)
            found = line.makespan, line.makespan - line.busy[0], max(line.own_idle)
            assert claimed(name, ranks, microbatches, virtual, costs) == found
            assert idle_share(name, ranks, microbatches, virtual, costs) == line.idle_share[0]
            if costs.overlapped is None:
                assert len(set(line.idle_share)) == 1
            held += 1
    assert held > 60


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_formulas_over_their_domain(name, data):
    size, costs = data.draw(sizes(name)), data.draw(costs_within(name))
    line = simulate(generate(name, *size), costs)
    assert claimed(name, *size, costs) == (line.makespan, line.makespan - line.busy[0], max(line.own_idle))
    assert idle_share(name, *size, costs) == line.idle_share[0]


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_formulas_by_the_slow_way(name, data):
    size, costs = data.draw(sizes(name, 5, 12, 3)), data.draw(costs_within(name))
    assert claimed(name, *size, costs) == measured(generate(name, *size), costs)


def test_the_makespan_convention_literally():
    for ranks, microbatches in GRID:
        for costs in (Costs(1, 1, 1), Costs(Fraction(2, 3), 1, 0)):
            share = Fraction(ranks - 1, microbatches + ranks - 1)
            assert idle_share("gpipe", ranks, microbatches, costs=costs) == share
            assert idle_share("1f1b", ranks, microbatches, costs=costs) == share
        for virtual in (1, 2, 3):
            slots = virtual * max(microbatches, ranks) + min(microbatches, ranks) - 1
            assert idle_share("interleaved-1f1b", ranks, microbatches, virtual) == 1 - Fraction(
                virtual * microbatches, slots
            )
            if microbatches >= ranks:
                assert slots == virtual * microbatches + ranks - 1
    assert idle_share("zb-v", 4, 8) == Fraction(3, 51)
    assert own_idle("zb-v", 4, 8) == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(data=st.data(), size=st.sampled_from(GRID))
def test_makespan_lies_within_its_bounds(name, data, size):
    stages, microbatches = size
    forward, backward = (data.draw(st.lists(COST, min_size=stages, max_size=stages)) for _ in range(2))
    low, high = makespan_bounds(name, forward, backward, microbatches)
    costs = Costs(forward, backward, 0)
    assert low <= simulate(generate(name, stages, microbatches), costs).makespan <= high
    assert low == high or name == "1f1b"


def test_1f1b_within_its_bounds_at_every_small_cost():
    inside = 0
    for stages, microbatches in product((2, 3), range(1, 6)):
        schedule = generate("1f1b", stages, microbatches)
        for numbers in product(range(5 - stages), repeat=2 * stages):
            forward, backward = (list(map(Fraction, half)) for half in (numbers[:stages], numbers[stages:]))
            low, high = makespan_bounds("1f1b", forward, backward, microbatches)
            time = simulate(schedule, Costs(forward, backward, 0)).makespan
            assert low <= time <= high
            inside += low < time < high
    assert inside, "costs at which neither bound is the answer, or the test shows less than it says"


def test_makespan_bounds_literally():
    forward, backward = [Fraction(1), Fraction(3)], [Fraction(2), Fraction(4)]
    assert makespan_bounds("gpipe", forward, backward, 3) == (4 + 2 * 3 + 6 + 2 * 4,) * 2
    assert makespan_bounds("1f1b", forward, backward, 3) == (3 + 3 * 7, 24)


def test_equal_costs_make_both_bounds_the_closed_form():
    for stages, microbatches in GRID:
        ones = [Fraction(1)] * stages
        both = (makespan("1f1b", stages, microbatches, costs=Costs(1, 1, 0)),) * 2
        assert makespan_bounds("1f1b", ones, ones, microbatches) == both


def test_what_no_formula_covers_is_refused():
    with pytest.raises(UsageError, match="schedule 'zb-h3': expected one of gpipe, 1f1b"):
        idle_share("zb-h3", 2, 2)
    with pytest.raises(UsageError, match="zb-v: a closed form needs W <= F <= I"):
        own_idle("zb-v", 2, 2, costs=Costs(1, 1, 2))
    with pytest.raises(UsageError, match="dualpipe-v: a closed form needs W <= I"):
        makespan("dualpipe-v", 2, 4, costs=Costs(1, 1, 1, overlapped=1))
    with pytest.raises(UsageError, match="costs that differ between stages"):
        makespan_idle("gpipe", 2, 4, costs=Costs(forward=[1, 2]))
    with pytest.raises(UsageError, match="communication that takes time"):
        makespan("1f1b", 2, 4, costs=Costs(latency=1))
    with pytest.raises(UsageError, match="'zb-h1': no bounds at unequal costs; expected one of gpipe, 1f1b"):
        makespan_bounds("zb-h1", [Fraction(1)], [Fraction(1)], 1)
    with pytest.raises(UsageError, match="ranks=0"):
        makespan_bounds("gpipe", [], [], 1)
    with pytest.raises(UsageError, match="2 forward costs, 1 backward costs"):
        makespan_bounds("gpipe", [Fraction(1)] * 2, [Fraction(1)], 1)


def test_costs_that_are_alike_on_all_stages_are_one_cost():
    assert makespan("gpipe", 2, 3, costs=Costs([1, 1], [2, 2], [3, 3])) == makespan("gpipe", 2, 3, costs=Costs(1, 2, 3))
