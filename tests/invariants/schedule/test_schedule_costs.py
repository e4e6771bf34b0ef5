"""Costs: what is kept of a number, when ticks are exact, and what is refused."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import parse_rows
from invariants.schedule.computations import computations
from invariants.schedule.costs import Costs, ticks
from invariants.schedule.families import generate
from invariants.schedule.table import B, F, I, Schedule, W
from invariants.schedule.timeline import simulate

NUMBER = st.integers(0, 10**6) | st.fractions(0, 10**3) | st.decimals(0, 10**3, places=4) | st.floats(0, 10**3)


def priced(costs, *rows):
    return ticks(costs, computations(Schedule.of_rows(parse_rows(row.split() for row in rows))))


@given(NUMBER)
def test_a_number_is_the_decimal_that_it_prints(number):
    kept = Costs(forward=number).forward
    assert kept == Fraction(str(number))
    assert Costs(forward=[number]).forward == (kept,)


def test_numbers_of_numpy_are_numbers():
    costs = Costs(np.float64(0.1), np.int32(2), np.array([1.5, 2.5]))
    assert (costs.forward, costs.input_gradient) == (Fraction(1, 10), 2)
    assert costs.weight_gradient == (Fraction(3, 2), Fraction(5, 2))


@given(NUMBER, NUMBER, NUMBER)
def test_ticks_are_whole_and_a_full_backward_takes_both_halves(forward, inputs, weights):
    prices = priced(Costs(forward, inputs, weights), "0F0 0B0")
    wide = max(Fraction(str(number)).denominator for number in (forward, inputs, weights)) > 10**8
    assert prices.exact or wide
    if prices.exact:
        for op, number in ((F, forward), (I, inputs), (W, weights)):
            assert int(prices.took[op, 0]) * prices.unit == Fraction(str(number))
        assert prices.took.dtype == np.int64
    assert prices.took[B, 0] == prices.took[I, 0] + prices.took[W, 0]


@pytest.mark.parametrize(("cost", "exact"), [(2**63 // 16 - 1, True), (2**63 // 16, False)])
def test_ticks_are_exact_up_to_the_last_that_fits(cost, exact):
    schedule = generate("gpipe", 1, 8)
    timeline = simulate(schedule, Costs(cost, 0, 0))
    assert timeline.exact is exact
    assert timeline.makespan == pytest.approx(8 * cost)
    assert timeline.end.dtype == (np.int64 if exact else np.float64)
    assert (timeline.end > 0).all()


def test_links_are_priced_by_their_ranks_and_messages_by_the_earlier_stage():
    rows = "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"
    costs = Costs(latency={(0, 1): 5, (1, 0): 7}, bandwidth={(0, 1): 2, (1, 0): 4}, message_bytes=[8, 99, 16, 99])
    prices = priced(costs, *rows)
    assert prices.links == ((0, 1), (1, 0))
    assert prices.link.tolist() == [[0, -1, 1, -1], [-1, 1, -1, 0]]
    assert prices.transfer.tolist() == [[4, 0, 4, 0], [0, 2, 0, 8]]
    assert prices.latency.tolist() == [[5, 0, 7, 0], [0, 7, 0, 5]]


def test_bytes_are_whole():
    assert Costs(activation_bytes=2e9).bytes_of(2).tolist() == [2 * 10**9] * 2
    assert Costs(activation_bytes=[1, 2]).bytes_of(2).tolist() == [1, 2]
    assert Costs().bytes_of(2) is None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"forward": -1}, "costs: forward=-1: expected 0 or more"),
        ({"weight_gradient": [1, Decimal("-0.5")]}, "costs: weight_gradient=-0.5: expected 0 or more"),
        ({"input_gradient": float("inf")}, "costs: input_gradient=inf: expected a finite number"),
        ({"input_gradient": Decimal("NaN")}, "expected a finite number"),
        ({"overlapped": "2"}, "costs: overlapped='2': expected a finite number"),
        ({"forward": None}, "costs: forward=None: expected a finite number"),
        ({"latency": None}, "costs: latency=None: expected a finite number"),
        ({"latency": {(0, 1): -1}}, "costs: latency=-1: expected 0 or more"),
        ({"bandwidth": 0, "message_bytes": 1}, "costs: bandwidth=0: expected more than 0"),
        ({"bandwidth": 1}, "costs: bandwidth without message_bytes: expected both or neither"),
        ({"message_bytes": 1}, "costs: message_bytes without bandwidth: expected both or neither"),
        ({"activation_bytes": 0.5}, "costs: activation_bytes=1/2: expected whole bytes"),
        ({"activation_bytes": [1, 2**48]}, "costs: activation_bytes=281474976710656: expected whole bytes, fewer than"),
    ],
)
def test_costs_without_sense_are_refused(made, message):
    with pytest.raises(UsageError, match=message):
        Costs(**made)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"forward": [1]}, "costs: forward: 1 numbers for 2 stages: expected one a stage, or one"),
        ({"overlapped": [1, 2, 3]}, "costs: overlapped: 3 numbers for 2 stages"),
        ({"latency": {(0, 1): 1}}, "costs: latency of link 1->0 is missing: expected one for each link in use"),
        ({"bandwidth": {}, "message_bytes": 1}, "costs: bandwidth of link 0->1 is missing"),
        ({"bandwidth": 1, "message_bytes": [1]}, "costs: message_bytes: 1 numbers for 2 stages"),
    ],
)
def test_costs_that_do_not_fit_the_schedule_are_refused(made, message):
    with pytest.raises(UsageError, match=message):
        simulate(generate("gpipe", 2, 1), Costs(**made))


def test_bytes_that_do_not_fit_the_schedule_are_refused():
    with pytest.raises(UsageError, match="costs: activation_bytes: 1 numbers for 2 stages"):
        Costs(activation_bytes=[1]).bytes_of(2)
