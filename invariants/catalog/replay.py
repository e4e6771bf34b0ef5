"""What ranks posted, replayed as NCCL would carry it out: which operation waits for which, on which stream.

The network of `invariants.schedule.engine`, made of recorded operations instead of a schedule. A *slot* is one action
of it: a message is one, a collective one for each other member, and what a rank has waited for is one of a queue of
its own, the rank's stream of computation. The rules are those of `nccl_lazy` and `nccl_eager` in
`invariants.schedule.transports`, which names their sources; collectives and batches take the stream of their group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from invariants.communication import NEW_GROUP, POINT_TO_POINT, SEND, Operation
from invariants.schedule.engine import DONE, NOBODY, NOTHING, STARTED, Network, Rest, run

Key = tuple[object, ...]


@dataclass(frozen=True)
class Replay:
    """How it ends: all operations get through, where nothing is `stuck`.

    `cycle`: operations that wait, each with the one of another rank that it waits for, which comes after the next that
    waits; after the first, for the last. `lost`: one that meets none. `swapped`: sends, each with the receive that
    takes its message though it has another tag.
    """

    cycle: tuple[tuple[Operation, Operation], ...]
    lost: Operation | None
    swapped: tuple[tuple[Operation, Operation], ...]

    @property
    def stuck(self) -> Operation | None:
        """An operation that waits for ever."""
        return self.cycle[0][0] if self.cycle else self.lost

    def __str__(self) -> str:
        """The waits in words."""
        if self.lost is not None:
            return f"{_said(self.lost)} meets nothing: {_missing(self.lost)}"
        if not self.cycle:
            return "all operations get through"
        waiting, wanted = zip(*((_said(operation), _said(partner)) for operation, partner in self.cycle), strict=True)
        behind = (*waiting[1:], "the first")
        waits = "; that waits for ".join(
            f"{each}, which comes after {first}" for each, first in zip(wanted, behind, strict=True)
        )
        return f"{waiting[0]} waits for {waits}"


def replay(operations: Iterable[Operation], *, pairs: bool) -> Replay:
    """Replay all operations of all ranks of one run.

    `pairs`: messages that are posted one by one go through a communicator of their own for each unordered pair of
    ranks (`nccl-lazy`), and not through the group's (`nccl-eager`). The work is linear in the number of slots.
    """
    posted = [operation for operation in operations if operation.kind != NEW_GROUP]
    slots = _slots(sorted(posted, key=lambda operation: (operation.rank, operation.number)), pairs)
    rest = run(slots.network())
    return Replay(*_Waits(slots, rest).ends(), tuple(slots.swapped()))


@dataclass
class _Slots:
    """Slots in the order in which they were made; `queues` lists them by stream, in the order in which they start."""

    operations: list[Operation] = field(default_factory=list)
    queues: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    queue: list[Key] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    rendezvous: dict[Key, int] = field(default_factory=dict)

    def add(self, operation: Operation, queue: Key, *, opens: bool, before: int) -> int:
        slot = len(self.operations)
        self.operations.append(operation)
        self.queues[queue].append(slot)
        self.queue.append(queue)
        self.opens.append(opens)
        self.before.append(before)
        self.beside.append(NOTHING)
        return slot

    def network(self) -> Network:
        queues = list(self.queues.values())
        order = [slot for queue in queues for slot in queue]
        ends = np.cumsum([0, *map(len, queues)]).astype(np.int64)
        opens = np.array(self.opens, np.bool_)[order] if order else np.zeros(0, np.bool_)
        columns = (np.array(column, np.int32) for column in (self.before, self.beside))
        return Network(ends, np.array(order, np.int32), opens, *columns)

    def swapped(self) -> Iterator[tuple[Operation, Operation]]:
        for operation, partner in zip(self.operations, self.beside, strict=True):
            if operation.kind == SEND and partner >= 0 and self.operations[partner].tag != operation.tag:
                yield operation, self.operations[partner]


def _slots(operations: Sequence[Operation], pairs: bool) -> _Slots:
    """`operations` by rank, each rank's in the order in which it posted them."""
    slots = _Slots()
    turns: dict[Key, int] = defaultdict(int)
    wanted: list[tuple[int, Key | None]] = []
    for rank, group in groupby(operations, key=lambda operation: operation.rank):
        own = list(group)
        # What the rank waited for, the last first. Its later operations start after that, and after all before it.
        waited = sorted((each for each in own if each.completed), key=lambda each: -each.completed)
        first: dict[int, int] = {}
        computed = NOTHING
        for operation in own:
            while waited and waited[-1].completed <= operation.posted:
                done = waited.pop()
                computed = slots.add(done, (rank, "computation"), opens=True, before=first[done.number])
            stream = _stream(operation, pairs)
            last = slots.queues[rank, stream][-1:]
            joins = operation.batch > 0 and any(slots.operations[slot].batch == operation.batch for slot in last)
            for index, (name, met) in enumerate(_meetings(operation, stream, turns)):
                slot = slots.add(operation, (rank, stream), opens=not (joins or index), before=computed)
                first.setdefault(operation.number, slot)
                slots.rendezvous.setdefault(name, slot)
                wanted.append((slot, met))
    for slot, met in wanted:
        slots.beside[slot] = NOTHING if met is None else slots.rendezvous.get(met, NOBODY)
    return slots


def _stream(operation: Operation, pairs: bool) -> Key:
    if pairs and operation.kind in POINT_TO_POINT and not operation.batch:
        return operation.group, *sorted((operation.rank, operation.peer))
    return (operation.group,)


def _meetings(operation: Operation, stream: Key, turns: dict[Key, int]) -> Iterator[tuple[Key, Key | None]]:
    """By which name each slot of the operation can be met, and the name of what it meets."""
    if operation.kind in POINT_TO_POINT:
        sends = operation.kind == SEND
        ends = (operation.rank, operation.peer) if sends else (operation.peer, operation.rank)
        channel = (stream, sends, ends)
        turns[channel] += 1
        yield (*channel, turns[channel]), (stream, not sends, ends, turns[channel])
        return
    others = [member for member in operation.members if member != operation.rank]
    for other in (*others,) or (None,):
        yield (stream, operation.turn, operation.rank), None if other is None else (stream, operation.turn, other)


class _Waits:
    """Follows the waits of slots that have come to rest."""

    def __init__(self, slots: _Slots, rest: Rest) -> None:
        self.slots, self.state = slots, rest.state

    def ends(self) -> tuple[tuple[tuple[Operation, Operation], ...], Operation | None]:
        """From the first slot that is not done, until one repeats or meets nobody: the cycle, or who is lost."""
        operations, beside = self.slots.operations, self.slots.beside
        path = [self._holding(int(slot)) for slot in np.flatnonzero(self.state < DONE)[:1]]
        while path and path[-1] not in path[:-1]:
            if beside[path[-1]] == NOBODY:
                return (), operations[path[-1]]
            path.append(self._holding(beside[path[-1]]))
        cycle = path[path.index(path[-1]) : -1] if path else []
        return tuple((operations[slot], operations[beside[slot]]) for slot in cycle), None

    def _holding(self, slot: int) -> int:
        """The slot that has started, waits for its partner, and keeps `slot` from its start; or `slot` itself."""
        while True:
            queue = self.slots.queues[self.slots.queue[slot]]
            head = next(each for each in queue if self.state[each] < DONE)
            waiting = [each for each in self._step(queue, head) if self._lacks(each)]
            slot = waiting[0]
            if self.state[slot] == STARTED:
                return slot
            slot = self.slots.before[slot]

    def _step(self, queue: list[int], head: int) -> Iterator[int]:
        yield head
        for slot in queue[queue.index(head) + 1 :]:
            if self.slots.opens[slot]:
                return
            yield slot

    def _lacks(self, slot: int) -> bool:
        if self.state[slot] == STARTED:
            partner = self.slots.beside[slot]
            return partner == NOBODY or (partner != NOTHING and bool(self.state[partner] < STARTED))
        before = self.slots.before[slot]
        return before != NOTHING and bool(self.state[before] < DONE)


def _said(operation: Operation) -> str:
    return f"rank {operation.rank}'s {operation}"


def _missing(operation: Operation) -> str:
    if operation.kind not in POINT_TO_POINT:
        return "not every member takes part"
    what = "receive" if operation.kind == SEND else "send"
    how = "in a batch" if operation.batch else "alone"
    return f"rank {operation.peer} posts no {what} for it that is left, {how} as it is"
