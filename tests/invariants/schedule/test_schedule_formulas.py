"""The closed forms against simulation, over their domains."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.costs import Costs
from invariants.schedule.families import generate
from invariants.schedule.formulas import idle_share, in_flight_bound, makespan
from invariants.schedule.timeline import simulate

GRID = list(product(range(1, 9), range(1, 17)))
COST = st.fractions(0, 10, max_denominator=6)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_idle_share_on_the_whole_grid(name):
    for stages, microbatches in GRID:
        forward, backward = [Fraction(2, 3)] * stages, [Fraction(1)] * stages
        shares = simulate(generate(name, stages, microbatches), Costs(forward, backward, 0)).idle_share
        assert (
            set(shares) == {idle_share(name, stages, microbatches)} == {Fraction(stages - 1, microbatches + stages - 1)}
        )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.sampled_from(GRID))
def test_makespan_lies_within_its_bounds(name, data, size):
    stages, microbatches = size
    forward, backward = (data.draw(st.lists(COST, min_size=stages, max_size=stages)) for _ in range(2))
    low, high = makespan(name, forward, backward, microbatches)
    assert low <= simulate(generate(name, stages, microbatches), Costs(forward, backward, 0)).makespan <= high
    assert low == high or name == "1f1b"


def test_1f1b_within_its_bounds_at_every_small_cost():
    inside = 0
    for stages, microbatches in product((2, 3), range(1, 6)):
        rows = generate("1f1b", stages, microbatches)
        for costs in product(range(5 - stages), repeat=2 * stages):
            forward, backward = (list(map(Fraction, half)) for half in (costs[:stages], costs[stages:]))
            low, high = makespan("1f1b", forward, backward, microbatches)
            time = simulate(rows, Costs(forward, backward, 0)).makespan
            assert low <= time <= high
            inside += low < time < high
    assert inside, "costs at which neither bound is the answer, or the test shows less than it says"


def test_makespan_literally():
    forward, backward = [Fraction(1), Fraction(3)], [Fraction(2), Fraction(4)]
    assert makespan("gpipe", forward, backward, 3) == (4 + 2 * 3 + 6 + 2 * 4,) * 2
    assert makespan("1f1b", forward, backward, 3) == (3 + 3 * 7, 24)


def test_equal_costs_make_both_bounds_one():
    for stages, microbatches in GRID:
        ones = [Fraction(1)] * stages
        assert makespan("1f1b", ones, ones, microbatches) == (2 * (microbatches + stages - 1),) * 2


def test_in_flight_literally():
    assert [in_flight_bound("gpipe", stage, 4, 3) for stage in range(4)] == [3, 3, 3, 3]
    assert [in_flight_bound("1f1b", stage, 4, 3) for stage in range(4)] == [3, 3, 2, 1]


def test_what_no_formula_covers_is_refused():
    with pytest.raises(UsageError, match="'zb-h1': no closed form; expected one of gpipe, 1f1b"):
        idle_share("zb-h1", 2, 2)
    with pytest.raises(UsageError, match="stages=0"):
        makespan("gpipe", [], [], 1)
    with pytest.raises(UsageError, match="2 forward costs, 1 backward costs"):
        makespan("gpipe", [Fraction(1)] * 2, [Fraction(1)], 1)
    with pytest.raises(UsageError, match="microbatches=0"):
        in_flight_bound("1f1b", 0, 2, 0)
    with pytest.raises(UsageError, match="stage=2: expected 0 to 1"):
        in_flight_bound("1f1b", 2, 2, 2)
