"""Layers to stages: the split whose largest stage is least, and what a given split costs beside it.

A pipeline runs at the pace of its largest stage, so what counts is equal compute, not equal parameters or equal numbers
of layers: give the embedding and the head as layers of their own, with their own costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.costs import Number, exact_number


@dataclass(frozen=True)
class Balance:
    """A split of layers into stages beside the best one; a split is the number of layers of each stage.

    `costs` are those of the stages, `largest` the greatest of them; `imbalance` is `largest` over the mean stage, 1
    where all are equal (and where all cost nothing). `best` is `best_split` of the same layers into as many stages, and
    `least` its largest stage: no split into contiguous stages has less.
    """

    split: tuple[int, ...]
    costs: tuple[Fraction, ...]
    largest: Fraction
    imbalance: Fraction
    best: tuple[int, ...]
    least: Fraction


def balance(costs: Sequence[Number], split: Sequence[int]) -> Balance:
    """Judge a split of layers that cost `costs`; floats count as the decimals that they print.

    A split that does not give each stage a layer or more, and each layer a stage, is a `UsageError`; and so are costs
    that are negative or not finite.
    """
    split = tuple(split)
    layers = [exact_number("layer", cost) for cost in costs]
    if min(split, default=0) < 1 or sum(split) != len(layers):
        raise UsageError(f"split {split} of {len(layers)} layers: expected 1 or more a stage, {len(layers)} in all")
    stages = _stage_costs(layers, split)
    best = best_split(layers, len(split))
    total = sum(layers, Fraction())
    return Balance(
        split=split,
        costs=stages,
        largest=max(stages),
        imbalance=max(stages) * len(stages) / total if total else Fraction(1),
        best=best,
        least=max(_stage_costs(layers, best)),
    )


def best_split(costs: Sequence[Number], stages: int) -> tuple[int, ...]:
    """Numbers of layers of each stage in the best split of layers that cost `costs` into contiguous stages.

    The largest stage is the least possible. Of the splits that have it so, the one with the least variance of its
    stages; of those, the one with the fewest layers on the first stages (the first in lexicographic order), since these
    hold the most activations. Each stage has a layer or more; fewer layers than stages, or no stage, is a `UsageError`.

    Exact, by dynamic programming over the stages from the last to the first: O(N L log L) for L layers and N stages in
    steps of numpy. Squares of the total cost, counted in the smallest common unit of the costs, that do not fit into
    int64 are computed as Python's integers, several times as slowly.
    """
    layers = [exact_number("layer", cost) for cost in costs]
    if not 1 <= stages <= len(layers):
        raise UsageError(f"split: {stages} stages for {len(layers)} layers: expected 1 or more, and a layer for each")
    unit = math.lcm(*[cost.denominator for cost in layers])
    whole = [cost.numerator * (unit // cost.denominator) for cost in layers]
    before = np.array([0, *whole], np.int64 if sum(whole) ** 2 < 2**63 else object).cumsum()
    ends = _least_squares(before, stages, _least_largest(before, stages))
    bounds = [0]
    for end in ends:
        bounds.append(int(end[bounds[-1]]))
    return tuple(last - first for first, last in pairwise(bounds))


def _stage_costs(layers: Sequence[Fraction], split: Sequence[int]) -> tuple[Fraction, ...]:
    bounds = [0, *accumulate(split)]
    return tuple(sum(layers[first:last], Fraction()) for first, last in pairwise(bounds))


def _least_largest(before: NDArray[Any], stages: int) -> Any:
    """The largest stage of the best split, from the cost before each layer [L+1].

    With k stages left, where the next one ends, its own cost rises and what is left after it falls: the best end is
    where they cross, or the one before.
    """
    layers = len(before) - 1
    largest = before[-1] - before
    for left in range(2, stages + 1):
        last = layers - left + 1
        start = np.arange(last)
        cross = np.searchsorted(before[: last + 1] - largest[: last + 1], before[:last])
        ends = (np.clip(cross - step, start + 1, last) for step in (0, 1))
        one, other = (np.maximum(before[end] - before[:last], largest[end]) for end in ends)
        largest = np.minimum(one, other)
    return largest[0]


def _least_squares(before: NDArray[Any], stages: int, limit: Any) -> list[NDArray[np.int64]]:
    """Where each stage ends [L+1], from the first stage on, by where it starts, at the least sum of squares.

    No stage exceeds `limit`. At a given total the sum of squares is the variance, up to constants.
    """
    layers = len(before) - 1
    reach = np.searchsorted(before, before + limit, side="right") - 1
    forth, back = [0], [layers]
    for _ in range(stages):
        forth.append(int(reach[forth[-1]]))
        back.append(int(np.searchsorted(reach, back[-1])))
    ends: list[NDArray[np.int64]] = []
    squares = np.zeros_like(before)
    first = last = layers
    for left in range(1, stages + 1):
        start = np.arange(max(back[left], stages - left), min(forth[stages - left], layers - left) + 1)
        low, high = np.maximum(start + 1, first), np.minimum(reach[start], last)
        best = _best_ends(before, squares, start, low, high)
        following = np.zeros_like(squares)
        following[start] = (before[best] - before[start]) ** 2 + squares[best]
        end = np.zeros(layers + 1, np.int64)
        end[start] = best
        ends.append(end)
        squares, first, last = following, start[0], start[-1]
    return ends[::-1]


def _best_ends(
    before: NDArray[Any],
    squares: NDArray[Any],
    start: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
) -> NDArray[np.int64]:
    """For each start the first end within `low` to `high` at which the sum of squares is least.

    It rises with the start (the square of a sum satisfies the quadrangle inequality), so the ends of every second start
    bound those between them: O(L log L), for all starts of one distance at once.
    """
    ends = np.empty_like(start)
    step = 1 << len(start).bit_length()
    while step > 1:
        half = step // 2
        at = np.arange(half - 1, len(start), step)
        least, most = low[at], high[at]
        least[1:] = np.maximum(least[1:], ends[at[1:] - half])
        right = at + half < len(start)
        most[right] = np.minimum(most[right], ends[at[right] + half])
        sizes = most - least + 1
        opens = np.cumsum(sizes) - sizes
        end = np.arange(sizes.sum()) + np.repeat(least - opens, sizes)
        value = (before[end] - np.repeat(before[start[at]], sizes)) ** 2 + squares[end]
        lowest = np.minimum.reduceat(value, opens)
        found = np.flatnonzero(value == np.repeat(lowest, sizes))
        ends[at] = end[found[np.searchsorted(found, opens)]]
        step = half
    return ends
