"""Wrong functions for `faults.py`: each takes the original and returns what is planted in its place.

The originals' signatures are theirs to change, so arguments are `Any` here; torch is imported on the ranks only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

Make = Callable[[Any], Any]
"""From the original function or value to the one that takes its place."""


# Pipeline


def zero_where_not_received(backward: Any) -> Any:
    """Go on with a gradient of zero where none has come."""

    def guess(self: Any, index: int) -> None:
        import torch

        if not self.grid.last:
            self.output_gradients.setdefault(index, torch.zeros_like(self.outputs[index]))
        backward(self, index)

    return guess


def retaining(where: str) -> Make:
    """Keep the graph of each microbatch, on the pass over a batch (`execution`) or on the `pipeline`, which stays."""

    def make(backward: Any) -> Any:
        def keep(self: Any, index: int) -> None:
            import torch

            owner = self if where == "execution" else self.pipeline
            owner.__dict__.setdefault("kept", []).append(self.outputs[index])
            original = torch.autograd.backward
            with mock.patch.object(torch.autograd, "backward", partial(original, retain_graph=True)):
                backward(self, index)

        return keep

    return make


def rescaled_after_each_batch(run: Any) -> Any:
    """Normalise the gradients so far by the number of microbatches, after each batch of a window."""

    def rescale(self: Any, microbatches: Any, count: int) -> Any:
        size = len(microbatches)
        loss = run(self, microbatches, count / size)
        for parameter in self.stage.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(size)
        return loss / size

    return rescale


def divided_again(run: Any) -> Any:
    """Divide by the number of microbatches what is normalised already."""
    return lambda self, microbatches, count: run(self, microbatches, count * len(microbatches))


def only_last_batch(run: Any) -> Any:
    """Clear the gradients before each batch of a window."""

    def reset(self: Any, microbatches: Any, count: int) -> Any:
        _zero_gradients(self.stage)
        return run(self, microbatches, count)

    return reset


def only_last_microbatch(backward: Any) -> Any:
    """Clear the gradients before each microbatch."""

    def reset(self: Any, index: int) -> None:
        _zero_gradients(self.pipeline.stage)
        backward(self, index)

    return reset


def _zero_gradients(stage: Any) -> None:
    for parameter in stage.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def mean_of_replica_means(run: Any) -> Any:
    """Average over each replica's own tokens."""

    def local(self: Any, microbatches: Any, _count: int) -> Any:
        tokens = sum(int(microbatch.mask.sum()) for microbatch in microbatches)
        return run(self, microbatches, max(1, tokens) * self.grid.dp)

    return local


def mean_of_microbatch_means(forward: Any) -> Any:
    """Average over each microbatch's own tokens."""

    def local(self: Any, index: int) -> None:
        self.count = max(1, int(self.microbatches[index].mask.sum())) * len(self.microbatches) * self.grid.dp
        forward(self, index)

    return local


def first_mask_for_all(run: Any) -> Any:
    """Use the first microbatch's mask for every one."""

    def same(self: Any, microbatches: Any, count: int) -> Any:
        return run(self, [part._replace(mask=microbatches[0].mask) for part in microbatches], count)

    return same


# Losses


def nan_on_last_rank(step: Any) -> Any:
    """Report NaN on one rank, from the second step on."""

    def late(self: Any, *arguments: Any) -> float:
        loss: float = step(self, *arguments)
        return float("nan") if self.steps >= 2 and self.grid.rank == self.grid.world_size - 1 else loss

    return late


def zero_loss(step: Any) -> Any:
    """Report a loss of 0."""
    return lambda *arguments: 0.0 * step(*arguments)


def placeholder(step: Any) -> Any:
    """Report -1 before the last stage."""

    def before_last(self: Any, *arguments: Any) -> float:
        loss: float = step(self, *arguments)
        return loss if self.grid.last else -1.0

    return before_last


# Data parallelism and ZeRO-1


def nothing(_original: Any) -> Any:
    """Leave the call out."""
    return lambda *_arguments, **_options: None


def seed_of_replica(build: Any) -> Any:
    """Initialise each replica differently."""

    def seeded(self: Any, config: Any, grid: Any) -> None:
        build(self, replace(config, seed=config.seed + grid.dp_index), grid)

    return seeded


def tied_sum_after_shards(reduce: Any) -> Any:
    """Sum the tied gradients when the shards have been taken already."""

    def late(self: Any) -> None:
        from impl.ddp import sum_tied_gradient

        reduce(self)
        for group in self.groups:
            for slot in group.slots:
                if slot.name == "0.token.weight" and group.grid.pp > 1 and group.grid.dp > 1:
                    sum_tied_gradient(slot.parameter.grad, group.grid)

    return late


def own_gradient_only(_reduce: Any) -> Any:
    """Take the own gradient for the sum."""
    return lambda self: self.reduced.copy_(self.gradients[self.start : self.stop])


def shifted_shards(gather: Any) -> Any:
    """Put each shard where the next one belongs."""

    def shift(self: Any) -> None:
        gather(self)
        self.parameters.copy_(self.parameters.roll(self.shard.numel()))

    return shift


def update_of_copies(_update: Any) -> Any:
    """Update a copy of the parameters."""

    def update(self: Any) -> None:
        before = self.shard.clone()
        if self.elements:
            self.optimizer.step()
        self.shard.copy_(before)

    return update


def rate_times_replicas(build: Any) -> Any:
    """Multiply the learning rate by the number of replicas."""

    def scaled(self: Any, named: Any, grid: Any, rule: Any, **options: Any) -> None:
        build(self, named, grid, replace(rule, lr=rule.lr * grid.dp), **options)

    return scaled


def index_of_global_rank(build: Any) -> Any:
    """Derive the shard from the rank in the world."""

    def wrong(self: Any, named: Any, grid: Any, rule: Any) -> None:
        build(self, named, replace(grid, rank=grid.rank // grid.pp), rule)

    return wrong


def shard_group_of_one(build: Any) -> Any:
    """Shard over a group that holds this rank alone."""

    def whole(self: Any, named: Any, grid: Any, rule: Any) -> None:
        build(self, named, replace(grid, dp=1), rule)
        self.replicas = grid

    return whole


# Checkpoints


def from_rank_0(prefix: str) -> Make:
    """Give each rank what rank 0 saved under names with `prefix`."""

    def make(read: Any) -> Any:
        def wrong(folder: Any, header: Any, rank: int) -> Any:
            manifest, tensors = read(folder, header, rank)
            of_rank_0 = read(folder, header, 0)[1]
            return manifest, {
                name: of_rank_0[name] if name.startswith(prefix) else own for name, own in tensors.items()
            }

        return wrong

    return make


def shard_of_replica_0(read: Any) -> Any:
    """Give each replica what replica 0 of its stage saved."""

    def wrong(folder: Any, header: Any, rank: int) -> Any:
        replicas = header["grid"]["dp"]
        return read(folder, header, rank // replicas * replicas)

    return wrong


def zeroed(*keys: str) -> Make:
    """Leave these optimizer states at 0 after a load."""

    def make(load: Any) -> Any:
        def incomplete(self: Any, folder: Any) -> None:
            load(self, folder)
            for group in self.optimizer.groups:
                for key in keys:
                    group.state[key].zero_()

        return incomplete

    return make


def forgets_steps(load: Any) -> Any:
    """Count steps from 0 after a load."""

    def forget(self: Any, folder: Any) -> None:
        load(self, folder)
        self.steps = 0

    return forget
