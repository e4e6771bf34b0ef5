"""Splits are contiguous, complete and as balanced as can be."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from impl.config import Config
from impl.grid import ConfigurationError, Grid
from impl.model import GPT
from impl.partition import estimated_costs, measured_costs, partition

costs = st.lists(st.integers(0, 9) | st.floats(0, 1e6), min_size=1, max_size=8)


def dearest(split, costs):
    edges = [sum(split[:stage]) for stage in range(len(split) + 1)]
    return max(sum(costs[start:stop]) for start, stop in pairwise(edges))


@given(costs.flatmap(lambda drawn: st.tuples(st.just(drawn), st.integers(1, len(drawn)))))
@example(([0, 0, 0], 2))
@example(([9, 1, 1, 1], 3))
def test_no_other_split_is_cheaper(drawn):
    costs, stages = drawn
    split = partition(costs, stages)
    assert len(split) == stages
    assert sum(split) == len(costs)
    assert min(split) >= 1
    others = []
    for cuts in combinations(range(1, len(costs)), stages - 1):
        edges = [0, *cuts, len(costs)]
        others.append([right - left for left, right in pairwise(edges)])
    best = min(dearest(other, costs) for other in others)
    assert dearest(split, costs) == pytest.approx(best, rel=1e-12)


def test_balances_work_and_not_parameters():
    """The embedding of a large vocabulary has the most parameters and next to no work; the head has both."""
    gpt = GPT(layers=4, width=16, vocabulary=4096)
    assert partition(estimated_costs(gpt), 2) == (5, 1)


@pytest.mark.parametrize("stages", [0, 4])
def test_stages_that_do_not_fit(stages):
    with pytest.raises(ConfigurationError, match=f"stages={stages}: expected 1 to 3"):
        partition([1, 1, 1], stages)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none(bad):
    with pytest.raises(ConfigurationError, match="expected finite numbers"):
        partition([1, bad], 1)


def test_measured_costs_are_positive_seconds():
    measured = measured_costs(GPT(), 1, Grid(1, 1, 0, torch.device("cpu")), torch.float32, repeats=1)
    assert len(measured) == 4
    assert all(0 < seconds < 10 for seconds in measured)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 5}, "pp=5: expected at most 4, the number of layers with embedding and head"),
        ({"pp": 0}, "pp=0: expected 1 or more"),
        ({"microbatches": 0}, "microbatches=0: expected 1 or more"),
        ({"schedule": "zigzag"}, "schedule=zigzag: expected one of gpipe, 1f1b"),
        ({"precision": "int8"}, "precision=int8: expected one of float32, float64"),
        ({"model": GPT(heads=3)}, "width=32: expected a multiple of heads=3"),
        ({"pp": 2, "split": (4, 1)}, r"split=4\+1: expected 2 stages of 1 or more layers, 4 in all"),
        ({"pp": 2, "split": (4, 0)}, r"split=4\+0: expected 2 stages"),
        ({"costs": (1.0,)}, r"costs=\[1.0\]: expected 4, one a layer"),
        ({"frozen": (7,)}, r"frozen=\[7\]: expected some of the layers 0 to 3, not all"),
        ({"frozen": (0, 1, 2, 3)}, "not all"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        Config(**settings)
