"""The contract of communication: what operations of several ranks must agree on, and where they do not.

Operations are paired by their turns, as `invariants.communication` says; none that is missing in a record hides the
next. After its first mismatch a sequence is out of step, so that one alone is told.

What collectives have to agree on is what torch compares under TORCH_DISTRIBUTED_DEBUG=DETAIL (ProcessGroupWrapper.cpp:
kind, number of tensors, dtypes, shapes), and reduction, root and the table of parts, which it does not look at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from invariants.communication import ANY_SOURCE, NEW_GROUP, POINT_TO_POINT, SEND, Operation

Records = Mapping[int, Sequence[Operation]]
"""Operations by rank."""

_TABLES = frozenset({"all_to_all", "all_to_all_single"})
_PARTS = frozenset({"all_gather", "gather", "scatter"})
_UNEVEN = _TABLES | _PARTS | {"reduce_scatter"}
"""Collectives whose members may hand in tensors of different sizes."""


@dataclass(frozen=True)
class Mismatch:
    """Operations of two ranks that should fit and do not, in `feature`.

    `other` is None where `rank` has none for `one`; -1 stands for all ranks.
    """

    where: str
    feature: str
    one: Operation
    other: Operation | None
    rank: int

    def __str__(self) -> str:
        return f"{self.where}, {self.feature}: rank {self.one.rank}: {self.one}; {self.observed}"

    @property
    def observed(self) -> str:
        """The other side in words."""
        return f"{f'rank {self.rank}' if self.rank >= 0 else 'all ranks'}: {self.other or 'none'}"


def disagreements(records: Records, *, ended: bool = True) -> Iterator[Mismatch]:
    """Where the members of a group do not take part in the same collectives: the first place in each group.

    The k-th collective of a group is the same kind, dtype, reduction and root on each member; its shape is the same, or
    what each member says that another one sends is what that one sends. Groups are opened by all ranks in one order;
    those with local synchronization, by their members. Where the ranks have `ended`, all have the same number of them.
    """
    groups: dict[tuple[object, ...], dict[int, dict[int, Operation]]] = defaultdict(lambda: defaultdict(dict))
    for rank, operations in records.items():
        for operation in operations:
            if operation.kind not in POINT_TO_POINT and operation.turn:
                # Groups that bear one name and have different members are different groups.
                members = () if operation.kind == NEW_GROUP else operation.members
                groups[(*operation.sequence, members)][operation.turn][rank] = operation
    for turns in groups.values():
        for turn, posted in sorted(turns.items()):
            if found := _disagreement(turn, dict(sorted(posted.items())), records, ended):
                yield found
                break


def unpaired(records: Records, *, ended: bool = True) -> Iterator[Mismatch]:
    """Where messages and receives do not fit: the first place between each sender and receiver, by group and tag.

    The k-th send is the k-th receive at the other end, of the same dtype, shape and bytes. Where the ranks have
    `ended`, none is left over. A receive from any source may take any message to its rank, so that with one of them the
    sends and the receives of a rank are only compared as a whole, once the ranks have `ended`.
    """
    ways: dict[tuple[object, ...], dict[tuple[int, int], list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for operations in records.values():
        for operation in operations:
            if operation.kind in POINT_TO_POINT and operation.turn:
                mine, peer = operation.rank, operation.peer
                ends = (mine, peer) if operation.kind == SEND else (peer, mine)
                tag = operation.tag if operation.device == "cpu" else 0
                ways[operation.group, operation.device, ends[1], tag][ends].append(operation)
    for channels in ways.values():
        posted = [operation for channel in channels.values() for operation in channel]
        if any(operation.kind == ANY_SOURCE for operation in posted):
            found = _mixed(posted) if ended else None
            yield from [found] if found else []
            continue
        for ends, channel in channels.items():
            if found := _crossed(channel, ends, set(records) if ended else set()):
                yield found


def _disagreement(turn: int, posted: Mapping[int, Operation], records: Records, ended: bool) -> Mismatch | None:
    first = next(iter(posted.values()))
    opens = first.kind == NEW_GROUP
    everyone = opens and not first.group.startswith("local ")
    taking_part = [rank for rank in (records if everyone else first.members) if rank in records]
    what = "group opened" if opens else "collective"
    where = f"{_ordinal(turn)} {what} {'by' if opens else 'of'} ranks {', '.join(map(str, sorted(taking_part)))}"
    for rank, other in posted.items():
        if feature := _difference(first, other):
            return Mismatch(where, feature, first, other, rank)
    for one in posted.values():
        for rank, other in posted.items():
            if not _fits(one, other):
                return Mismatch(where, "part", one, other, rank)
    missing = sorted(set(taking_part) - set(posted)) if ended else []
    return Mismatch(where, "number", first, None, missing[0]) if missing else None


def _difference(one: Operation, other: Operation) -> str:
    """The first thing that two members disagree on."""
    features = {"kind": (one.kind, other.kind)}
    if one.kind == NEW_GROUP:
        features["members"] = (str(one.members), str(other.members))
    features["dtype"] = (one.dtype, other.dtype)
    features["reduction"] = (one.reduction, other.reduction)
    features["root"] = (str(one.peer), str(other.peer))
    if one.kind not in _UNEVEN:
        features["shape"] = (f"{one.tensors}{one.shape}{one.bytes}", f"{other.tensors}{other.shape}{other.bytes}")
    if one.kind == "reduce_scatter":
        features["parts"] = (str(one.splits), str(other.splits))
    return next((name for name, (left, right) in features.items() if left != right), "")


def _fits(one: Operation, other: Operation) -> bool:
    """Whether what `one` expects from or for `other` is what that one sends or takes."""
    if one.kind in _TABLES:
        return _part(one, 1, other.rank) == _part(other, 0, one.rank)
    if one.kind in _PARTS and one.splits:  # only the root has a list to gather into or to scatter
        return _part(one, 0, other.rank) == _elements(other)
    return True


def _part(operation: Operation, table: int, member: int) -> int | None:
    """None where the table has none: torch refuses it only after it was recorded."""
    return dict(zip(operation.members, (operation.splits[table : table + 1] or ((),))[0], strict=False)).get(member)


def _elements(operation: Operation) -> int:
    """Of all its tensors; its shape may be cut short."""
    bits = re.search(r"\d+", operation.dtype)
    return operation.bytes // (int(bits.group()) // 8 if bits else 1)


def _crossed(channel: Sequence[Operation], ends: tuple[int, int], ended: set[int]) -> Mismatch | None:
    """The first message of a sender to a receiver that is not what is received in its turn."""
    sends = {each.turn: each for each in channel if each.kind == SEND}
    receives = {each.turn: each for each in channel if each.kind != SEND}
    for turn in sorted({*sends, *receives}):
        send, receive = sends.get(turn), receives.get(turn)
        where = f"{_ordinal(turn)} message from rank {ends[0]} to rank {ends[1]}"
        if send and receive:
            for name in ("dtype", "shape", "bytes"):
                if getattr(send, name) != getattr(receive, name):
                    return Mismatch(where, name, send, receive, receive.rank)
        elif ended.issuperset(ends):
            left = send or receive
            assert left is not None
            return Mismatch(where, "number", left, None, ends[1] if send else ends[0])
    return None


def _mixed(posted: Sequence[Operation]) -> Mismatch | None:
    """A receive of a rank that no message fits, or a message that no receive fits; `posted` are those of one tag."""
    sends = [each for each in posted if each.kind == SEND]
    receives = [each for each in posted if each.kind != SEND]
    receiver = receives[0].rank
    where = f"messages to rank {receiver}, from whatever rank"
    # Named senders first: a receive from any source takes what they leave.
    for receive in sorted(receives, key=lambda each: each.kind == ANY_SOURCE):
        fitting = (each for each in sends if receive.peer in (-1, each.rank) and _message(each) == _message(receive))
        send = next(fitting, None)
        if send is None:
            return Mismatch(where, "number", receive, None, receive.peer)
        sends.remove(send)
    return Mismatch(where, "number", sends[0], None, receiver) if sends else None


def _message(operation: Operation) -> tuple[object, ...]:
    return operation.dtype, operation.shape, operation.bytes


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
