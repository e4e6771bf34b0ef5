"""All settings of a run, checked before any process or communication starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise

import torch

from impl.grid import ConfigurationError
from impl.model import GPT
from impl.partition import estimated_costs, partition
from impl.schedule import instructions
from impl.zero1 import Rule

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Config:
    """What a run is; equal configurations and equal windows give equal bits.

    `microbatches` are those of one replica in one global batch. `split` is the number of layers of each stage; without
    it, stages are balanced by `costs`, one a layer, which are estimated multiply-adds where they are not given.
    `frozen` are indices of layers that are not trained.
    """

    pp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 4
    microbatch_size: int = 1
    model: GPT = field(default_factory=GPT)
    split: tuple[int, ...] | None = None
    costs: tuple[float, ...] | None = None
    precision: str = "float32"
    rule: Rule = field(default_factory=Rule)
    frozen: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"pp": self.pp, "dp": self.dp}
        sizes |= {"microbatches": self.microbatches, "microbatch_size": self.microbatch_size}
        sizes |= {name: size for name, size in asdict(self.model).items() if name != "tied"}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigurationError(f"{name}={size}: expected 1 or more")
        if self.model.width % self.model.heads:
            raise ConfigurationError(f"width={self.model.width}: expected a multiple of heads={self.model.heads}")
        if self.precision not in PRECISIONS:
            raise ConfigurationError(f"precision={self.precision}: expected one of {', '.join(PRECISIONS)}")
        if not set(self.frozen) < set(range(self.model.depth)):
            raise ConfigurationError(
                f"frozen={list(self.frozen)}: expected some of the layers 0 to {self.model.depth - 1}, not all"
            )
        instructions(self.schedule, self.pp, self.microbatches)
        self.stages()

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, gradients and optimizer state."""
        return PRECISIONS[self.precision]

    @property
    def batch_size(self) -> int:
        """Samples of one global batch."""
        return self.dp * self.microbatches * self.microbatch_size

    def stages(self) -> tuple[range, ...]:
        """Layer indices of each stage."""
        depth = self.model.depth
        if self.pp > depth:
            raise ConfigurationError(
                f"pp={self.pp}: expected at most {depth}, the number of layers with embedding and head"
            )
        if self.costs is not None and len(self.costs) != depth:
            raise ConfigurationError(f"costs={list(self.costs)}: expected {depth}, one a layer")
        split = self.split or partition(self.costs or estimated_costs(self.model), self.pp)
        if len(split) != self.pp or sum(split) != depth or min(split) < 1:
            raise ConfigurationError(
                f"split={'+'.join(map(str, split))}: expected {self.pp} stages of 1 or more layers, {depth} in all"
            )
        edges = [sum(split[:stage]) for stage in range(self.pp + 1)]
        return tuple(range(start, stop) for start, stop in pairwise(edges))

    def describe(self) -> dict[str, object]:
        """What a checkpoint depends on, as JSON: the same again, or a checkpoint does not fit."""
        return {
            "world_size": self.pp * self.dp,
            "grid": {"pp": self.pp, "dp": self.dp},
            "split": [len(stage) for stage in self.stages()],
            "model": asdict(self.model),
            "precision": self.precision,
            "optimizer": asdict(self.rule),
            "frozen": sorted(set(self.frozen)),
        }
