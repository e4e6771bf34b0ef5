"""Training on any grid: `Trainer` puts the parts together; `python -m impl.trainer` runs it.

One step over a window of global batches, on each rank:

    clear gradients -> pipeline over each batch -> sum the tied gradient -> reduce-scatter -> update the shard -> gather
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from impl import checkpoint, ddp
from impl.config import Config
from impl.grid import ConfigurationError, Grid
from impl.model import build_stage, named_parameters
from impl.pipeline import Microbatch, Pipeline
from impl.schedule import instructions
from impl.zero1 import Zero1


class Trainer:
    """One rank of a run."""

    def __init__(self, config: Config, grid: Grid) -> None:
        if (grid.pp, grid.dp) != (config.pp, config.dp):
            raise ConfigurationError(f"grid pp={grid.pp} dp={grid.dp}: the run needs pp={config.pp} dp={config.dp}")
        self.config = config
        self.grid = grid
        self.steps = 0
        gpt, layers = config.model, config.stages()[grid.pp_index]
        self.stage = build_stage(gpt, layers, config.seed, frozen=config.frozen, dtype=config.dtype).to(grid.device)
        ddp.broadcast((*self.stage.parameters(), *self.stage.buffers()), grid)
        self.parameters = named_parameters(self.stage, gpt)
        self.optimizer = Zero1(self.parameters, grid, config.rule, shared=filter(None, [gpt.tied_name]))
        row = instructions(config.schedule, config.pp, config.microbatches)[grid.pp_index]
        self.pipeline = Pipeline(self.stage, row, grid, gpt.width, config.dtype)

    def step(self, window: Sequence[ddp.Batch], reduced: Callable[[], object] = lambda: None) -> float:
        """Train on one window of global batches; returns its loss, the mean over the tokens that count (0 if none).

        `reduced` is called when the gradients are reduced and not yet used.
        """
        count = max(1, sum(int(batch.mask.sum()) for batch in window))
        self.optimizer.clear()
        loss = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for batch in window:
            loss += self.pipeline.run(self._share(batch), count)
        self._sum_tied()
        self.optimizer.reduce()
        reduced()
        self.optimizer.update()
        self.optimizer.gather()
        self.steps += 1
        return float(self.grid.sum(loss))

    def _share(self, batch: ddp.Batch) -> list[Microbatch]:
        return ddp.microbatches_of(batch, self.grid, self.config.microbatches, self.config.microbatch_size)

    def _sum_tied(self) -> None:
        tied = self.parameters.get(self.config.model.tied_name or "")
        if tied is not None and tied.grad is not None and self.grid.pp > 1:
            ddp.sum_tied_gradient(tied.grad, self.grid)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write a checkpoint; collective. Returns its manifest."""
        header = {"step": self.steps, **self.config.describe()}
        return checkpoint.save(folder, self._tensors(), self.optimizer.layout(), header, self.grid)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint of the same configuration; collective. Nothing changes where it cannot be read."""
        manifest, tensors = checkpoint.load(folder, self.config.describe(), self.grid)
        own = self._tensors()
        if own.keys() != tensors.keys():
            different = ", ".join(sorted(own.keys() ^ tensors.keys()))
            raise checkpoint.CheckpointError(f"{folder}: rank {self.grid.rank}: tensors differ: {different}")
        with torch.no_grad():
            for name, tensor in own.items():
                if not name.startswith("rng."):
                    tensor.copy_(tensors[name])
        _set_random_state(tensors, self.grid)
        self.optimizer.gather()
        self.steps = int(manifest["step"])

    def _tensors(self) -> dict[str, Tensor]:
        """All that makes this rank go on alike: its shards, what it does not shard, and its random state."""
        unsharded = {
            name: parameter.detach() for name, parameter in self.parameters.items() if not parameter.requires_grad
        }
        return {**self.optimizer.tensors(), **unsharded, **dict(self.stage.named_buffers()), **_random_state(self.grid)}

    def digest(self) -> str:
        """Hash of all parameters of the world, the same on each rank; collective."""
        own = hashlib.blake2b(digest_size=16)
        for parameter in self.parameters.values():
            own.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return hashlib.blake2b("".join(self.grid.gather(own.hexdigest())).encode(), digest_size=16).hexdigest()


def _random_state(grid: Grid) -> dict[str, Tensor]:
    """Random states of torch and Python, as tensors."""
    python = torch.tensor(list(json.dumps(random.getstate()).encode()), dtype=torch.uint8)
    state = {"rng.torch": torch.get_rng_state(), "rng.python": python}
    if grid.device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(grid.device)
    return state


def _set_random_state(tensors: dict[str, Tensor], grid: Grid) -> None:
    version, words, gauss = json.loads(bytes(tensors["rng.python"].tolist()))
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(tensors["rng.torch"])
    if grid.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], grid.device)


if __name__ == "__main__":
    from impl.cli import main

    raise SystemExit(main())
