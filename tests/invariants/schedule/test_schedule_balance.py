"""The best split against all splits, and what a given one costs beside it."""

from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.balance import balance, best_split

WIDE = st.integers(2**40, 2**41)
"""Squares of these do not fit into int64."""
COSTS = st.lists(st.integers(0, 4), min_size=1, max_size=9) | st.lists(WIDE | st.just(0), min_size=1, max_size=7)


def stage_costs(costs, split):
    return [sum(costs[first:last]) for first, last in pairwise(accumulate(split, initial=0))]


def splits(layers, stages):
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(last - first for first, last in pairwise((0, *cuts, layers)))


def rule(costs, split):
    """What is least in the best split: the largest stage, then the variance, then the layers of the first stages."""
    stages = stage_costs(costs, split)
    return max(stages), sum(cost**2 for cost in stages), split


@given(COSTS, st.data())
def test_no_split_is_better(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    best = best_split(costs, stages)
    assert best == min(splits(len(costs), stages), key=lambda split: rule(costs, split))
    given_split = data.draw(st.sampled_from(list(splits(len(costs), stages))))
    judged = balance(costs, given_split)
    assert judged.costs == tuple(stage_costs(costs, given_split))
    assert judged.largest == max(judged.costs) >= judged.least == max(stage_costs(costs, best))
    assert judged.best == best
    assert judged.imbalance == (judged.largest / Fraction(sum(costs), stages) if any(costs) else 1)


@given(COSTS, st.fractions(Fraction(1, 9), 9), st.data())
def test_the_unit_of_the_costs_does_not_matter(costs, unit, data):
    stages = data.draw(st.integers(1, len(costs)))
    assert best_split([cost * unit for cost in costs], stages) == best_split(costs, stages)


def test_literally():
    assert best_split([1, 1, 1, 1, 10], 3) == (2, 2, 1)
    assert best_split([1] * 7, 3) == (2, 2, 3)
    assert best_split([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2) == (1, 9)
    assert best_split([5], 1) == (1,)
    assert best_split([0, 0, 0], 3) == (1, 1, 1)


def test_an_embedding_and_a_head_are_layers_of_their_own():
    layers = [2, *[3] * 8, 7]
    equal_numbers = balance(layers, [3, 2, 2, 3])
    assert equal_numbers.costs == (8, 6, 6, 13)
    assert equal_numbers.imbalance == Fraction(13 * 4, 33)
    assert (equal_numbers.best, equal_numbers.least) == ((3, 3, 3, 1), 9)


def test_decimals_are_exact():
    assert balance([0.1, 0.2, 0.3], [2, 1]).costs == (Fraction(3, 10), Fraction(3, 10))
    assert balance([Decimal("0.1"), Fraction(1, 3), np.float64(0.5)], [1, 2]).largest == Fraction(5, 6)


@pytest.mark.parametrize("spread", [2, 1000])
def test_thousands_of_layers_on_hundreds_of_stages(spread):
    costs = np.random.default_rng(0).integers(1, spread, 4000).tolist()
    costs[7] = 3 * max(costs)
    best = best_split(costs, 256)
    largest = max(stage_costs(costs, best))
    assert (len(best), sum(best), min(best) >= 1) == (256, 4000, True)
    assert stages_needed(costs, largest) <= 256 < stages_needed(costs, largest - 1)


def stages_needed(costs, limit):
    """Fewest stages of at most `limit` each, by filling one after the other; infinite where a layer exceeds it."""
    stages, filled = 1, 0
    for cost in costs:
        if cost > limit:
            return float("inf")
        stages, filled = (stages, filled + cost) if filled + cost <= limit else (stages + 1, cost)
    return stages


@pytest.mark.parametrize(
    ("costs", "split", "message"),
    [
        ([1, 1], [1, 2], r"split \(1, 2\) of 2 layers: expected 1 or more a stage, 2 in all"),
        ([1, 1], [2, 0], r"split \(2, 0\) of 2 layers: expected 1 or more"),
        ([], [], r"split \(\) of 0 layers"),
        ([1, -1], [1, 1], "layer=-1: expected 0 or more"),
        ([1, float("nan")], [1, 1], "layer=nan: expected a finite number"),
        ([1, "much"], [1, 1], "layer='much': expected a finite number"),
    ],
)
def test_splits_and_costs_without_sense_are_refused(costs, split, message):
    with pytest.raises(UsageError, match=message):
        balance(costs, split)


@pytest.mark.parametrize("stages", [0, 3])
def test_a_stage_without_a_layer_is_refused(stages):
    with pytest.raises(UsageError, match=f"split: {stages} stages for 2 layers"):
        best_split([1, 1], stages)
