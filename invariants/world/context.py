"""What a rank knows of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from invariants.errors import UsageError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from invariants.case import Topology
    from invariants.world.recorder import Recorder


@dataclass
class RankContext:
    """Handed to every function that a world runs, as its first argument.

    `generator` is seeded by the rank and fresh for each call. `state` lives as long as the test or example that uses
    the world, so that a later call finds what an earlier one left. `groups` caches subgroups by their ranks over the
    life of the world: creating one costs milliseconds, destroying one tens of them. `recorder` has noted what this rank
    communicated since then.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    generator: torch.Generator
    recorder: Recorder
    state: dict[str, Any] = field(default_factory=dict)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`; every rank of the world must ask for the same groups in the same order.

        A rank that is not one of `ranks` gets torch's marker for that, which no communication accepts.
        """
        import torch.distributed as dist

        if ranks not in self.groups:
            whole = ranks == tuple(range(self.world_size))
            group = dist.group.WORLD if whole else dist.new_group(list(ranks), backend=self._group_backend)
            self.groups[ranks] = cast("dist.ProcessGroup", group)
        return self.groups[ranks]

    def axis_group(self, topology: Topology, axis: str) -> dist.ProcessGroup:
        """The group of this rank along `axis`; collective over the world on first use.

        Raises `UsageError` where the topology is not as large as the world.
        """
        if topology.world_size != self.world_size:
            raise UsageError(
                f"topology {topology} has {topology.world_size} ranks, the world has {self.world_size}: "
                "ask for the groups of a topology that fills the world"
            )
        # Every rank opens every group of the axis, in one order: creation is collective.
        for ranks in dict.fromkeys(topology.peers(axis, rank) for rank in range(self.world_size)):
            self.group(ranks)
        return self.groups[topology.peers(axis, self.rank)]

    @property
    def _group_backend(self) -> str | None:
        return None if self.backend == "nccl" else self.backend
