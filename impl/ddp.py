"""Data parallelism: who trains on what, the same bits on every replica, and one gradient for a tied weight.

The reduction of gradients over replicas is `zero1`'s, where it is at once the scatter of shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impl.grid import ConfigurationError, Grid
from impl.pipeline import Microbatch


class Batch(Protocol):
    """A global batch, the same on every rank: token ids, targets and mask (1 where a token counts), each [B, S]."""

    @property
    def tokens(self) -> Tensor:
        """Token ids."""

    @property
    def targets(self) -> Tensor:
        """Ids to be predicted."""

    @property
    def mask(self) -> Tensor:
        """Which tokens count."""


def broadcast(tensors: Iterable[Tensor], grid: Grid) -> None:
    """Overwrite `tensors` (a stage's parameters and buffers, in one order) with those of replica 0."""
    if grid.dp > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group=grid.dp_group, group_src=0)


def microbatches_of(batch: Batch, grid: Grid, microbatches: int, microbatch_size: int) -> list[Microbatch]:
    """This replica's contiguous share of a global batch, cut into contiguous microbatches, on this rank's device."""
    expected = grid.dp * microbatches * microbatch_size
    if batch.tokens.shape[0] != expected:
        raise ConfigurationError(
            f"batch of {batch.tokens.shape[0]} samples: expected dp x microbatches x microbatch_size ="
            f" {grid.dp} x {microbatches} x {microbatch_size} = {expected}"
        )
    share = slice(grid.dp_index * microbatches * microbatch_size, (grid.dp_index + 1) * microbatches * microbatch_size)
    parts = [
        torch.split(tensor[share].to(grid.device), microbatch_size)
        for tensor in (batch.tokens, batch.targets, batch.mask)
    ]
    return [Microbatch(*part) for part in zip(*parts, strict=True)]


def sum_tied_gradient(gradient: Tensor, grid: Grid) -> None:
    """Add up, in place, the gradients of a weight that the first and the last stage hold; only they call it.

    Both add in one order, the first stage's part plus the last's, so that both copies get the same bits. Comes once a
    window and before the reduction over replicas, which mixes the parts.
    """
    peer = grid.rank + (grid.pp - 1) * grid.dp * (1 if grid.first else -1)
    other = torch.empty_like(gradient)
    exchange = [
        dist.P2POp(dist.isend, gradient.clone(), peer, group=grid.pp_group),
        dist.P2POp(dist.irecv, other, peer, group=grid.pp_group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    first, last = (gradient, other) if grid.first else (other, gradient)
    torch.add(first, last, out=gradient)
