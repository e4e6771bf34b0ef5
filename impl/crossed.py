"""Faults of communication that gloo lets pass, and variants of it that are right; planted as those of `faults.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from impl.conditions import all_of, several_microbatches, several_ranks, several_stages
from impl.planting import fault, harmless
from impl.plants import Make
from invariants.target import Fault


def summed_as_integers(total: Any) -> Any:
    """Hand in integers on the last rank, and floating-point numbers elsewhere."""

    def total_of(self: Any, value: Any) -> Any:
        if self.rank < self.world_size - 1:
            return total(self, value)
        return value.copy_(total(self, value.long()))

    return total_of


def metrics_in_another_order(total: Any) -> Any:
    """Reduce one more metric, the largest value: after the sum, but on the last rank before it."""

    def total_of(self: Any, value: Any) -> Any:
        import torch.distributed as dist

        largest, last = value.clone(), self.rank == self.world_size - 1
        if self.world_size > 1 and last:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.world_group)
        total(self, value)
        if self.world_size > 1 and not last:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.world_group)
        return value

    return total_of


def received_into(buffer_for: Callable[[Any], Any], content: Callable[[Any, Any], Any]) -> Make:
    """Receive into what `buffer_for` a tensor is at hand, and take from it what `content` finds."""

    def make(communicate: Any) -> Any:
        def receive(self: Any, action: Any) -> None:
            if action.op.sends:
                communicate(self, action)
                return
            tensor, peer = self.message(action)
            buffer = buffer_for(tensor)
            self.receive(buffer, peer).wait()
            tensor.copy_(content(buffer, tensor))
            self.received(action)

        return receive

    return make


def longer(tensor: Any) -> Any:
    """A buffer for one more sample."""
    return tensor.new_empty((tensor.shape[0] + 1, *tensor.shape[1:]))


def integers(tensor: Any) -> Any:
    """A buffer of the same size, of integers."""
    import torch

    return tensor.new_empty(tensor.shape, dtype={4: torch.int32, 8: torch.int64}[tensor.element_size()])


def sent_again(send: Any) -> Any:
    """Send each activation once more, under a tag for which nobody asks."""

    def twice(self: Any, action: Any, tensor: Any, peer: int) -> None:
        import torch.distributed as dist

        send(self, action, tensor, peer)
        if action.op.forward:
            work = dist.isend(tensor, peer, group=self.grid.pp_group, tag=1)
            self.pipeline.__dict__.setdefault("unreceived", []).append((work, tensor))

    return twice


def through_one_buffer(*, waits: bool) -> Make:
    """Send all messages of a kind from one buffer; fill it once the last one is through, or else whenever."""

    def make(send: Any) -> Any:
        def copied(self: Any, action: Any, tensor: Any, peer: int) -> None:
            import torch

            if waits:
                self.finish_send(action.op)
            buffers = self.__dict__.setdefault("buffers", {})
            buffer = buffers.setdefault(action.op, torch.empty_like(tensor))
            send(self, action, buffer.copy_(tensor), peer)

        return copied

    return make


def tagged(_communicate: Any) -> Any:
    """Activations and gradients under tags of their own."""

    def communicate(self: Any, action: Any) -> None:
        import torch.distributed as dist

        tensor, peer = self.message(action)
        how = {"group": self.grid.pp_group, "tag": 1 + action.op.forward}
        if action.op.sends:
            self.finish_send(action.op)
            self.sending[action.op] = dist.isend(tensor, peer, **how), tensor
        else:
            dist.irecv(tensor, peer, **how).wait()  # type: ignore[union-attr]
            self.received(action)

    return communicate


def gathered_unevenly(_gather: Any) -> Any:
    """Gather texts as long as they are, by an all-to-all."""

    def gather(self: Any, value: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        if self.world_size == 1:
            return [value]
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        dist.all_gather_single(sizes, torch.tensor([data.numel()], device=self.device), group=self.world_group)
        received, sent = sizes.tolist(), [data.numel()] * self.world_size
        texts = data.new_empty(sum(received))
        dist.all_to_all_single(texts, data.repeat(self.world_size), received, sent, group=self.world_group)
        return [json.loads(bytes(text.tolist())) for text in torch.split(texts, received)]

    return gather


CROSSED: Mapping[str, Fault] = {
    "loss-summed-with-integers": fault(
        "https://github.com/pytorch/pytorch/issues/150248 (all_reduce takes other dtypes on other ranks)",
        several_ranks,
        {"grid.Grid.sum": summed_as_integers},
    ),
    "metrics-in-another-order": fault(
        "https://github.com/Lightning-AI/pytorch-lightning/issues/19106 (ranks log other metrics: one reduction each)",
        several_ranks,
        {"grid.Grid.sum": metrics_in_another_order},
    ),
    "received-into-longer-buffer": fault(
        "https://github.com/pytorch/pytorch/issues/126600 (receive buffers of the first microbatch, for all)",
        several_stages,
        {"pipeline.Execution.communicate": received_into(longer, lambda buffer, tensor: buffer[: len(tensor)])},
    ),
    "received-into-integers": fault(
        "https://github.com/pytorch/pytorch/issues/165143 (pipelining receives in another dtype than it sends)",
        several_stages,
        {"pipeline.Execution.communicate": received_into(integers, lambda buffer, tensor: buffer.view(tensor.dtype))},
    ),
    "activations-sent-again": fault(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/pipelining/schedules.py (its simulator "
        "accepts a send that nobody receives)",
        several_stages,
        {"pipeline.Execution.send": sent_again},
    ),
    "send-buffer-overwritten": fault(
        "https://github.com/NVIDIA/Megatron-LM/pull/4047 (an output is let go while it is still being sent)",
        all_of(several_stages, several_microbatches),
        {"pipeline.Execution.send": through_one_buffer(waits=False)},
    ),
    "one-send-buffer": harmless(
        "a buffer may be filled again once its send is done",
        several_stages,
        {"pipeline.Execution.send": through_one_buffer(waits=True)},
    ),
    "messages-with-tags": harmless(
        "both sides name the same tag", several_stages, {"pipeline.Execution.communicate": tagged}
    ),
    "texts-in-their-own-lengths": harmless(
        "parts of an all-to-all may be of any size", several_ranks, {"grid.Grid.gather": gathered_unevenly}
    ),
}
"""Named as in `faults.FAULTS`, which has them as well."""
