"""Which layers make a stage: contiguous, balanced by cost.

Parameter counts mislead: an embedding has many parameters and next to no work, the head of a large vocabulary costs as
much as several blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from impl.grid import ConfigurationError, Grid
from impl.model import GPT, build_layer


def partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Number of layers of each of `stages` contiguous stages, such that the dearest stage is as cheap as possible.

    Exact, by dynamic programming in O(stages * layers^2); each stage gets one layer or more.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ConfigurationError(
            f"stages={stages}: expected 1 to {layers}, one for each of the {layers} layers at most"
        )
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise ConfigurationError(f"costs={list(costs)}: expected finite numbers, 0 or more")
    total = [0.0, *accumulate(costs)]
    # best[end]: the dearest of the stages so far, the last of which ends before layer `end`; cuts say where it began.
    best = {end: total[end] for end in range(1, layers + 1)}
    cuts: list[dict[int, int]] = []
    for count in range(2, stages + 1):
        begins = {
            end: min(range(count - 1, end), key=lambda cut: max(best[cut], total[end] - total[cut]))
            for end in range(count, layers + 1)
        }
        best = {end: max(best[cut], total[end] - total[cut]) for end, cut in begins.items()}
        cuts.append(begins)
    edges = [layers]
    for begins in reversed(cuts):
        edges.append(begins[edges[-1]])
    edges.append(0)
    return tuple(right - left for right, left in pairwise(edges))[::-1]


def estimated_costs(gpt: GPT) -> tuple[float, ...]:
    """Multiply-adds of the forward per token and layer: a block 12 W^2 + 2 S W, the head V W, the embedding W."""
    block = 12 * gpt.width**2 + 2 * gpt.sequence * gpt.width
    return (gpt.width, *[block] * gpt.layers, gpt.vocabulary * gpt.width)


def measured_costs(gpt: GPT, batch_size: int, grid: Grid, dtype: torch.dtype, repeats: int = 5) -> tuple[float, ...]:
    """Seconds of forward and backward of each layer, the median of `repeats`, as rank 0 measured them.

    Collective: one rank's clock decides, else ranks would disagree about who holds which layer.
    """
    costs = (
        [_measure(gpt, index, batch_size, grid, dtype, repeats) for index in range(gpt.depth)] if grid.rank == 0 else []
    )
    return tuple(grid.gather(costs)[0])


def _measure(gpt: GPT, index: int, batch_size: int, grid: Grid, dtype: torch.dtype, repeats: int) -> float:
    layer = build_layer(gpt, index, 0).to(grid.device, dtype)
    shape = (batch_size, gpt.sequence)
    x: Tensor = torch.zeros(shape, dtype=torch.int64, device=grid.device)
    if index > 0:
        x = torch.ones((*shape, gpt.width), dtype=dtype, device=grid.device).requires_grad_()
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        layer(x).sum().backward()
        if grid.device.type == "cuda":
            torch.cuda.synchronize(grid.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first call pays for what torch sets up lazily
