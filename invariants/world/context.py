"""What a rank knows of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from invariants.case import Topology


@dataclass
class RankContext:
    """Handed to every function that a world runs, as its first argument.

    `generator` is seeded by the rank and fresh for each call. `state` lives as long as the test or example that uses
    the world, so that a later call finds what an earlier one left. `groups` caches subgroups by their ranks over the life
    of the world: creating one costs milliseconds, destroying one tens of them.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    generator: torch.Generator
    state: dict[str, Any] = field(default_factory=dict)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`; every rank of the world must ask for the same groups in the same order."""
        raise NotImplementedError

    def axis_group(self, topology: Topology, axis: str) -> dist.ProcessGroup:
        """The group of this rank along `axis`; collective over the world on first use."""
        raise NotImplementedError
