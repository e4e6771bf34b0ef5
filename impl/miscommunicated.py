"""Wrong communication for `faults.py`, planted as the functions of `plants.py` are: the numbers stay right."""

from __future__ import annotations

from typing import Any


def all_reduce(_reduce: Any) -> Any:
    """Sum all gradients on every replica, then take the own shard."""

    def reduce(self: Any) -> None:
        import torch.distributed as dist

        grid = getattr(self, "replicas", self.grid)
        if grid.dp > 1 and self.elements:
            dist.all_reduce(self.gradients, group=grid.dp_group)
            self.reduced.copy_(self.gradients[self.start : self.stop])

    return reduce


def reduced_at_every_microbatch(build: Any) -> Any:
    """Sum the gradients so far over replicas after each backward; the last sum is the right one."""

    def eager(self: Any, *arguments: Any) -> None:
        build(self, *arguments)
        self.pipeline.reduce = self.optimizer.reduce

    return eager


def then_reduced(backward: Any) -> Any:
    """The other half of `reduced_at_every_microbatch`."""

    def reduce(self: Any, index: int) -> None:
        backward(self, index)
        self.pipeline.reduce()

    return reduce


def in_double(_communicate: Any) -> Any:
    """Send activations and gradients in float64, and round them again where they are received."""

    def wide(self: Any, action: Any) -> None:
        tensor, peer = self.message(action)
        if action.op.sends:
            self.send(action, tensor.double(), peer)
            return
        received = tensor.double()
        self.receive(received, peer).wait()
        tensor.copy_(received)
        self.received(action)

    return wide


def one_by_one(_together: Any) -> Any:
    """Post alone what belongs together, sends first, and only then wait."""

    def post(self: Any, actions: Any) -> None:
        import torch.distributed as dist

        works = []
        for action in sorted(actions, key=lambda action: not action.op.sends):
            tensor, peer = self.message(action)
            how: Any = dist.isend if action.op.sends else dist.irecv
            works.append((how(tensor, peer, group=self.grid.pp_group), tensor))
        for work, _held in works:
            work.wait()
        for action in actions:
            self.received(action)

    return post
