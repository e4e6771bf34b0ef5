"""What the papers' tables say of idle time in a rank's own span, beside simulation: the claims of `schedule.bubble`.

Tables: 2 of arXiv:2401.10241 for ZB-H1 and ZB-H2, and that of DeepSeek's DualPipe.
"""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.schedule.costs import Costs
from invariants.schedule.families import generate
from invariants.schedule.formulas import outside, own_idle
from invariants.schedule.table import FIRST, NEXT, B, Schedule
from invariants.schedule.timeline import simulate

COST = st.fractions(0, 10, max_denominator=6)
RISING = st.lists(COST, min_size=3, max_size=3).map(sorted)
RANKS, MORE = st.integers(1, 12), st.integers(0, 12)


def longest(schedule, costs):
    return max(simulate(schedule, costs).own_idle)


def zb_h1(ranks, forward, inputs, weights):
    return (ranks - 1) * (forward + inputs - weights)


def zb_h2(ranks, forward, inputs, weights):
    return (ranks - 1) * max(0, forward + inputs - 2 * weights)


def dualpipe_v(ranks, inputs, weights, pair):
    return (ranks - 1) * (pair + (inputs + weights) - 3 * weights)


@given(ranks=RANKS, more=MORE, rising=RISING)
def test_zero_bubble_holds_where_weights_take_no_longer_than_forwards(ranks, more, rising):
    weights, *longer = rising
    for forward, inputs in (longer, reversed(longer)):
        costs = Costs(forward, inputs, weights)
        assert longest(generate("zb-h1", ranks, ranks + more), costs) == zb_h1(ranks, forward, inputs, weights)
        assert longest(generate("zb-h2", ranks, 2 * ranks - 1 + more), costs) == zb_h2(ranks, forward, inputs, weights)


@given(ranks=RANKS, more=MORE, rising=RISING)
def test_zb_h2_holds_where_inputs_take_no_longer_than_forwards(ranks, more, rising):
    inputs, forward, weights = rising
    found = longest(generate("zb-h2", ranks, 2 * ranks - 1 + more), Costs(forward, inputs, weights))
    assert found == zb_h2(ranks, forward, inputs, weights)


@pytest.mark.parametrize(
    ("name", "published", "numbers", "found", "table"),
    [("zb-h1", zb_h1, (1, 3, 2), 9, 6), ("zb-h1", zb_h1, (1, 1, 2), 3, 0), ("zb-h2", zb_h2, (1, 3, 2), 6, 0)],
)
def test_zero_bubble_fails_where_weights_take_longer_than_forwards(name, published, numbers, found, table):
    costs = Costs(*numbers)
    for microbatches in (7, 8, 40):
        assert longest(generate(name, 4, microbatches), costs) == own_idle(name, 4, microbatches, 1, costs) == found
    assert published(4, *numbers) == table


@given(ranks=RANKS, more=MORE, rising=RISING)
def test_rank_0_waits_for_its_first_gradient_whatever_the_order(ranks, more, rising):
    """Why no order of ZB-H1's memory does better where W > F: nothing is left to do after its N forwards."""
    forward, weights, inputs = rising
    waits = (ranks - 1) * inputs
    assert longest(generate("zb-h1", ranks, ranks + more), Costs(forward, inputs, weights)) == waits
    assert waits >= zb_h1(ranks, forward, inputs, weights)


def last_rank_overlapped(ranks, microbatches):
    """DualPipeV with the first pair of the last rank overlapped too."""
    schedule = generate("dualpipe-v", ranks, microbatches)
    joint = schedule.joint.copy()
    backward = int(schedule.starts[-2]) + int((schedule.op[schedule.starts[-2] :] == B).argmax())
    joint[backward - 1 : backward + 1] = FIRST, NEXT
    return Schedule(schedule.starts, schedule.op, schedule.stage, schedule.microbatch, joint)


@given(ranks=RANKS, more=MORE, rising=RISING)
def test_dualpipes_table_is_of_the_order_in_which_the_last_rank_overlaps_its_first_pair(ranks, more, rising):
    weights, forward, inputs = rising
    pair, costs = forward + inputs + weights, Costs(forward, inputs, weights)
    table, many = dualpipe_v(ranks, inputs, weights, pair), 2 * ranks + more
    assert longest(last_rank_overlapped(ranks, many), costs) == table
    assert table - longest(generate("dualpipe-v", ranks, many), costs) == (
        min(forward, (ranks - 1) * (inputs - forward)) if ranks > 1 else 0
    )


@given(ranks=RANKS, more=MORE, rising=RISING, data=st.data())
def test_dualpipes_table_is_an_upper_bound_where_overlap_saves_time(ranks, more, rising, data):
    weights, forward, inputs = rising
    pair = data.draw(st.fractions(inputs + weights, forward + inputs + weights, max_denominator=60))
    costs, many = Costs(forward, inputs, weights, pair), 2 * ranks + more
    assert own_idle("dualpipe-v", ranks, many, costs=costs) <= dualpipe_v(ranks, inputs, weights, pair)
    whole = forward + inputs + weights
    without = dualpipe_v(ranks, inputs, weights, whole)
    assert longest(last_rank_overlapped(ranks, many), costs) == without - 2 * (ranks - 1) * (whole - pair)


def test_dualpipes_table_literally():
    costs = Costs(10, 11, 7, 20)
    assert longest(generate("dualpipe-v", 8, 20), costs) == own_idle("dualpipe-v", 8, 20, costs=costs) == 64
    assert dualpipe_v(8, 11, 7, 20) == 119
    unit = Costs(1, 1, 1)
    assert longest(generate("dualpipe-v", 8, 20), unit) == dualpipe_v(8, 1, 1, 3) == 14


def test_outside_their_domains_the_closed_forms_are_lower_bounds():
    """Of what is not judged: costs at which ZB-V and DualPipeV have no closed form here."""
    seen = 0
    for ranks, (forward, inputs, weights) in product((1, 2, 3, 5), product((0, 1, 2, 3, 5), repeat=3)):
        many, costs = 2 * ranks, Costs(forward, inputs, weights)
        if outside("zb-v", ranks, many, costs=costs):
            least = (ranks - 1) * max(0, 2 * (inputs - weights), 2 * forward - inputs - weights)
            assert longest(generate("zb-v", ranks, many), costs) >= least
            seen += 1
        if outside("dualpipe-v", ranks, many, costs=costs):
            pair = forward + inputs + weights
            least = forward + (2 * ranks - 3) * pair - (3 * ranks - 4) * weights
            least -= min((ranks - 2) * inputs, ranks * forward - inputs)
            assert longest(generate("dualpipe-v", ranks, many), costs) >= (least if ranks > 1 else 0)
            seen += 1
    assert seen > 400
