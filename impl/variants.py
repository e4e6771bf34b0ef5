"""Other right functions for `faults.py`: each takes the original and returns what keeps every promise in its place."""

from __future__ import annotations

from typing import Any

from impl.plants import Make


def in_other_units(costs: Any) -> Any:
    """Costs of layers times 1024."""
    return lambda gpt: tuple(1024 * cost for cost in costs(gpt))


def reversed_sum(_reduce: Any) -> Any:
    """Add the replicas' gradients from the last to the first."""

    def reduce(self: Any) -> None:
        import torch
        import torch.distributed as dist

        if self.grid.dp > 1 and self.elements:
            parts = torch.empty_like(self.gradients)
            dist.all_to_all_single(parts, self.gradients, group=self.grid.dp_group)
            self.reduced.zero_()
            for part in reversed(parts.chunk(self.grid.dp)):
                self.reduced += part

    return reduce


def reversed_parameters(build: Any) -> Any:
    """Lay out the flat buffers in reverse."""

    def turned(self: Any, named: Any, *arguments: Any, **options: Any) -> None:
        build(self, dict(reversed(named.items())), *arguments, **options)

    return turned


def after_barrier(reduce: Any) -> Any:
    """Wait for all ranks first."""

    def late(self: Any) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
        reduce(self)

    return late


def looped(optimizer: Any) -> Any:
    """The same optimizer, neither fused nor over lists of tensors."""

    def plain(self: Any, tensor: Any) -> Any:
        for group in (made := optimizer(self, tensor)).param_groups:
            group.update(fused=False, foreach=False)
        return made

    return plain


def blocking(send: Any) -> Any:
    """Wait for each send at once."""

    def wait(self: Any, action: Any, *arguments: Any) -> None:
        send(self, action, *arguments)
        self.finish_send(action.op)

    return wait


def sum_of_gathered(_sum: Any) -> Any:
    """Gather the values and add them in rank order."""

    def total(self: Any, value: Any) -> Any:
        return value.fill_(sum(self.gather(float(value))))

    return total


def last_rank_first(together: Any) -> Any:
    """One rank works after the other, the last one first."""

    def in_turn(self: Any, work: Any) -> Any:
        import torch.distributed as dist

        def turn() -> Any:
            result = None
            for rank in reversed(range(self.world_size)):
                if rank == self.rank:
                    result = work()
                if self.world_size > 1:
                    dist.barrier(group=self.world_group)
            return result

        return together(self, turn)

    return in_turn


def counts(gpt: Any) -> list[float]:
    """All layers cost the same, embedding and head included."""
    return [1.0] * (int(gpt.layers) + 2)


def lowered(how: str) -> Make:
    """Another order of sends and receives."""
    return lambda _lowering: how
