"""What the methods of a process group are asked to do, told in one way, whatever their signatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from invariants.communication import ANY_SOURCE, RECV, SEND


@dataclass(frozen=True)
class Call:
    """The part of `invariants.communication.Operation` that a call tells. Ranks are those inside the group."""

    me: int
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
    tensors = [] if form.tensors is None else _flat(args[form.tensors])
    rest = (*args, *options.values())
    peer, tag = -1, 0
    if form.kind == ANY_SOURCE:
        tag = int(args[1])
    elif form.kind in (SEND, RECV):
        peer, tag = int(args[1]), int(args[2])
    elif form.rooted:
        peer = next((int(getattr(each, "rootRank", each)) for each in rest if _gives_root(each)), -1)
    splits = tuple(sizes for place in form.splits if (sizes := tuple(each.numel() for each in _flat(args[place]))))
    if form.kind == "all_to_all_single":
        splits = (_parts(args[1], args[3], group.size()), _parts(args[0], args[2], group.size()))
    first = tensors[0] if tensors else None
    return Call(
        me=group.rank(),
        peer=peer,
        tag=tag,
        dtype="" if first is None else str(first.dtype).removeprefix("torch."),
        shape=() if first is None else tuple(first.shape),
        tensors=len(tensors),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        reduction=_reduction(rest) if form.reduces else "",
        splits=splits,
        device=_own_device(form, group) if first is None else first.device.type,
    )


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors in a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


def _gives_root(value: object) -> bool:
    return isinstance(value, int) or hasattr(value, "rootRank")


def _reduction(args: Sequence[Any]) -> str:
    for value in args:
        value = getattr(value, "reduceOp", value)
        value = getattr(value, "op", value)
        if isinstance(value, dist.ReduceOp.RedOpType):
            return str(value.name).lower()
    return "sum"


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
