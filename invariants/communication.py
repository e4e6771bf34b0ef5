"""What ranks said to each other: one operation as data, and what a sequence of them must agree on.

Collectives match by their place in the sequence of their group: the k-th of one member is the k-th of each other.
Point-to-point messages match by their place among those of one sender, receiver and tag (of one sender and receiver on
NCCL, which knows no tags). That is how gloo, NCCL and MPI pair them.
"""

from __future__ import annotations

from dataclasses import dataclass

SEND, RECV, ANY_SOURCE, NEW_GROUP = "send", "recv", "recv_anysource", "new_group"
POINT_TO_POINT = frozenset({SEND, RECV, ANY_SOURCE})
CHANGED, UNWRITTEN = 1, 2
"""Flags of an operation: its buffer changed while it was sent; its buffer was not filled when it was received."""
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Collectives whose `peer` is their root."""


@dataclass(frozen=True)
class Operation:
    """One communication as one rank issued it. Ranks are global ones; times are seconds of one clock of the machine."""

    rank: int
    number: int
    """Its place among all operations of the rank since the record began."""
    kind: str
    group: str
    """torch's name of the group, the same on each of its members."""
    members: tuple[int, ...]
    """Of the group; of the group to be opened where `kind` is `new_group`."""
    turn: int
    """1 for the first of its sequence, see `sequence`."""
    device: str = "cpu"
    peer: int = -1
    """The other rank of a message (-1: any source), or the root of a collective that has one (-1: none)."""
    tag: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of the first tensor that the rank hands in (receives, for a receive and a scatter)."""
    tensors: int = 0
    bytes: int = 0
    """Of all tensors that the rank hands in (receives, for a receive and a scatter)."""
    reduction: str = ""
    splits: tuple[tuple[int, ...], ...] = ()
    """Elements for each member: of an all-to-all sent and received, of a gathered or scattered list each part."""
    batch: int = 0
    """The same for all operations of one `batch_isend_irecv`, 0 for one of its own."""
    label: str = ""
    source: str = ""
    """`file:line` of the innermost frame that is not torch's."""
    flags: int = 0
    """`CHANGED` and `UNWRITTEN`, where buffers were watched."""
    posted: float = 0.0
    completed: float = 0.0
    """When a wait for it returned; 0 where nobody waited, or still waits."""

    @property
    def sequence(self) -> tuple[object, ...]:
        """What `turn` counts in: the messages of a sender, receiver and tag, or the collectives of a group."""
        if self.kind not in POINT_TO_POINT:
            return self.group, self.device, "collective"
        ends = (self.rank, self.peer) if self.kind == SEND else (self.peer, self.rank)
        return self.group, self.device, self.kind, *ends, self.tag if self.device == "cpu" else 0

    def __str__(self) -> str:
        """As in `send of float32[4, 16] (F, microbatch 2) to rank 1, pipeline.py:88`."""
        text = self.kind
        if self.dtype:
            more = f" and {self.tensors - 1} more" if self.tensors > 1 else ""
            text += f" of {self.dtype}[{', '.join(map(str, self.shape))}]{more}"
        if self.label:
            text += f" ({self.label})"
        if self.reduction:
            text += f", {self.reduction}"
        if self.kind in POINT_TO_POINT:
            way = "to" if self.kind == SEND else "from"
            text += f" {way} {f'rank {self.peer}' if self.peer >= 0 else 'any rank'}"
            text += f", tag {self.tag}" if self.tag else ""
        else:
            text += f" over ranks {', '.join(map(str, self.members))}"
            text += f", root {self.peer}" if self.peer >= 0 else ""
        return f"{text}, {self.source}" if self.source else text
