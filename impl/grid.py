"""Where a rank sits: pipeline stages x data-parallel replicas, and the groups that it talks in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class ConfigurationError(ValueError):
    """A run that cannot be: the one-line message names the setting, its value and what would be right."""


@dataclass(frozen=True)
class Grid:
    """`pp` stages x `dp` replicas; rank = pp_index * dp + dp_index.

    A group is None where it would hold this rank alone: nothing is sent then, and one process trains without a process
    group. `world_group` None is torch's default group.
    """

    pp: int
    dp: int
    rank: int
    device: torch.device
    pp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if (self.pp > 1 and self.pp_group is None) or (self.dp > 1 and self.dp_group is None):
            raise ConfigurationError(f"grid pp={self.pp} dp={self.dp}: an axis of several ranks needs its group")

    @classmethod
    def create(cls, pp: int, dp: int, device: torch.device) -> Grid:
        """Make the groups in torch's default world; collective: all ranks create all groups, in one order."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if pp * dp != world:
            raise ConfigurationError(f"grid pp={pp} dp={dp} needs {pp * dp} ranks: the world has {world}")
        rank = dist.get_rank() if world > 1 else 0
        pp_ranks = [list(range(replica, world, dp)) for replica in range(dp)]
        dp_ranks = [list(range(stage * dp, stage * dp + dp)) for stage in range(pp)]
        pp_groups = [dist.new_group(ranks) for ranks in pp_ranks] if pp > 1 else [None] * dp
        dp_groups = [dist.new_group(ranks) for ranks in dp_ranks] if dp > 1 else [None] * pp
        return cls(pp, dp, rank, device, pp_groups[rank % dp], dp_groups[rank // dp])

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp

    @property
    def pp_index(self) -> int:
        """Stage of this rank."""
        return self.rank // self.dp

    @property
    def dp_index(self) -> int:
        """Replica of this rank."""
        return self.rank % self.dp

    @property
    def first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.pp_index == 0

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.pp_index == self.pp - 1

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of `value` over all ranks, in place, the same bits on each."""
        if self.world_size > 1:
            dist.all_reduce(value, group=self.world_group)
        return value

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, in rank order; `value` is anything that JSON can hold."""
        if self.world_size == 1:
            return [value]
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        dist.all_gather_single(sizes, torch.tensor([data.numel()], device=self.device), group=self.world_group)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        rows = torch.empty(self.world_size * longest, dtype=torch.uint8, device=self.device)
        dist.all_gather_single(rows, padded, group=self.world_group)
        texts = rows.view(self.world_size, longest).cpu()
        return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes.tolist(), strict=True)]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` here and hand every rank all results.

        What fails on one rank is raised on all of them, as a `RuntimeError` that names the rank: else the others would
        wait in their next collective for a rank that never comes.
        """
        failure: Exception | None = None
        value = None
        try:
            value = work()
        except Exception as error:
            failure = error
        results = self.gather([value, failure and (str(failure) or type(failure).__name__)])
        for rank, (_, message) in enumerate(results):
            if message is not None:
                raise RuntimeError(f"rank {rank}: {message}") from failure
        return [value for value, _ in results]
