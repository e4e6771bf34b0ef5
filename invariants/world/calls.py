"""What the methods of a process group are asked to do, told in one way, whatever their signatures."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from invariants.communication import ANY_SOURCE, RECV, SEND


class Call(NamedTuple):
    """The part of `invariants.communication.Operation` that a call tells. Ranks are those inside the group."""

    peer: int = -1
    tag: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    tensors: int = 0
    bytes: int = 0
    reduction: str = ""
    splits: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"


@dataclass(frozen=True)
class Identity:
    """A group, as the record names it: torch's name and the global ranks of its members; `text` is both.

    `rank` is this process's.
    """

    name: str
    members: tuple[int, ...]
    text: str
    rank: int

    @classmethod
    def of(cls, name: str, members: Sequence[int]) -> Identity:
        """From name and members."""
        return cls(name, tuple(members), json.dumps((name, tuple(members))), dist.get_rank())


@dataclass(frozen=True)
class Form:
    """How to read the arguments of a method."""

    kind: str
    """The operation's name, as users know it."""
    backend: str
    """The method of a backend that does it."""
    tensors: int | None = 0
    """Which argument holds the tensors that `Operation` tells of."""
    rooted: bool = False
    reduces: bool = False
    splits: tuple[int, ...] = ()
    """Which arguments are lists with a tensor for each member."""


CALLS: dict[str, Form] = {
    "allreduce": Form("all_reduce", "allreduce", reduces=True),
    "allreduce_coalesced": Form("all_reduce_coalesced", "allreduce_coalesced", reduces=True),
    "broadcast": Form("broadcast", "broadcast", rooted=True),
    "reduce": Form("reduce", "reduce", rooted=True, reduces=True),
    "allgather": Form("all_gather", "allgather", 1, splits=(0,)),
    "allgather_coalesced": Form("all_gather_coalesced", "allgather_coalesced", 1),
    "all_gather_single": Form("all_gather_into_tensor", "_allgather_base", 1),
    "_allgather_base": Form("all_gather_into_tensor", "_allgather_base", 1),
    "all_gather_single_coalesced": Form("all_gather_into_tensor", "_allgather_base", 1),
    "gather": Form("gather", "gather", 1, rooted=True, splits=(0,)),
    "scatter": Form("scatter", "scatter", 0, rooted=True, splits=(1,)),
    "reduce_scatter": Form("reduce_scatter", "reduce_scatter", 1, reduces=True, splits=(1,)),
    "reduce_scatter_single": Form("reduce_scatter_tensor", "_reduce_scatter_base", 1, reduces=True),
    "_reduce_scatter_base": Form("reduce_scatter_tensor", "_reduce_scatter_base", 1, reduces=True),
    "reduce_scatter_single_coalesced": Form("reduce_scatter_tensor", "_reduce_scatter_base", 1, reduces=True),
    "all_to_all_single": Form("all_to_all_single", "alltoall_base", 1),
    "alltoall": Form("all_to_all", "alltoall", 1, splits=(1, 0)),
    "send": Form(SEND, "send"),
    "recv": Form(RECV, "recv"),
    "recv_anysource": Form(ANY_SOURCE, "recv_anysource"),
    "barrier": Form("barrier", "barrier", None),
    "monitored_barrier": Form("monitored_barrier", "monitored_barrier", None),
}
"""By method of a process group. Of two names for one virtual method only the newer is here: each calls the other."""

for _newer, _older in {
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}.items():
    if not hasattr(dist.ProcessGroup, _newer):
        CALLS[_older] = CALLS.pop(_newer)


def described(form: Form, group: Any, args: Sequence[Any], options: dict[str, Any]) -> Call:
    """What a call on `group` asks for."""
    kind = form.kind
    if kind in (SEND, RECV) and len(args[0]) == 1:
        tensor, peer, tag = args[0][0], args[1], args[2]
        device = "cpu" if tensor.is_cpu else tensor.device.type
        return _message(peer, tag, tensor.dtype, tensor.shape, device)
    rest = (*args, *options.values()) if options else args
    peer, tag, reduction = -1, 0, ""
    splits: tuple[tuple[int, ...], ...] = ()
    if kind in (SEND, RECV):
        peer, tag = int(args[1]), int(args[2])
    elif kind == ANY_SOURCE:
        tag = int(args[1])
    elif form.rooted:
        peer = next((int(getattr(each, "rootRank", each)) for each in rest if _gives_root(each)), -1)
    if form.reduces:
        reduction = _reduction(rest)
    if form.splits:
        splits = tuple(sizes for place in form.splits if (sizes := tuple(each.numel() for each in _flat(args[place]))))
    elif kind == "all_to_all_single":
        splits = (_parts(args[1], args[3], group.size()), _parts(args[0], args[2], group.size()))
    tensors = () if form.tensors is None else _flat(args[form.tensors])
    if not tensors:
        return Call(peer, tag, "", (), 0, 0, reduction, splits, _own_device(form, group))
    first = tensors[0]
    size = first.numel() * first.element_size()
    if len(tensors) > 1:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    device = "cpu" if first.is_cpu else first.device.type
    dtype, shape = _named(first.dtype), tuple(first.shape)
    return Call(peer, tag, dtype, shape, len(tensors), size, reduction, splits, device)


def _flat(value: Any) -> Sequence[torch.Tensor]:
    """The tensors in a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if value and isinstance(value[0], torch.Tensor):
        return list(value)
    return [tensor for part in value for tensor in part]


@functools.lru_cache(4096)
def _message(peer: int, tag: int, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Call:
    size = math.prod(shape) * dtype.itemsize
    return Call(peer, tag, _named(dtype), tuple(shape), 1, size, device=device)


@functools.cache
def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gives_root(value: object) -> bool:
    return isinstance(value, int) or hasattr(value, "rootRank")


def _reduction(args: Sequence[Any]) -> str:
    for value in reversed(args):  # options come last
        value = getattr(value, "reduceOp", value)
        value = getattr(value, "op", value)
        if isinstance(value, dist.ReduceOp.RedOpType):
            return _lower(value)
    return "sum"


@functools.cache
def _lower(reduction: Any) -> str:
    return str(reduction.name).lower()


def _parts(tensor: torch.Tensor, rows: Sequence[int], members: int) -> tuple[int, ...]:
    """Elements for each member, of `rows` each or of equal parts."""
    if not len(rows):
        return (tensor.numel() // members,) * members
    row = tensor.numel() // max(1, tensor.shape[0])
    return tuple(int(part) * row for part in rows)


def _own_device(form: Form, group: Any) -> str:
    """Where an operation without tensors takes place: a barrier of a group with NCCL reduces on a GPU."""
    if form.kind == "barrier":
        for device in group._device_types:
            if group._get_backend(device).name() != "gloo":
                return str(device.type)
    return "cpu"
