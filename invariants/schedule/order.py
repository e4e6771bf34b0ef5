"""Whether lowered rows end, decided by one evaluation: which rank waits for which, and what is swapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.actions import Cell, Row
from invariants.schedule.compiled import available, loop
from invariants.schedule.completeness import shortened
from invariants.schedule.engine import DONE, NOBODY, NOTHING, STARTED, Rest, run
from invariants.schedule.matching import peer_rank
from invariants.schedule.rendezvous import all_meet
from invariants.schedule.table import IDLE, NEXT, SEND_B, SEND_F, Schedule, as_schedule
from invariants.schedule.transports import Wiring, wire


@dataclass(frozen=True)
class Outcome:
    """How rows end under a transport.

    `cycle` names the waits that keep each other from ending, each one by the next and the last by the first; or the one
    wait that nothing will ever end, which is not a cycle. A message is named by its sender's stage: `2F1` is what
    stage 2 made of microbatch 1. `mismatches` are messages that were received as something else: such a run may end,
    on wrong data. `last` is the last cell that each rank got done.
    """

    finished: bool
    cycle: tuple[str, ...]
    mismatches: tuple[str, ...]
    last: tuple[Cell | None, ...]


def evaluate(schedule: Schedule | Sequence[Row], transport: str) -> Outcome:
    """Run a schedule, or rows, one a rank, on a transport of `transports.TRANSPORTS`, in program order.

    A computation takes no time, and what it needs of its own rank is there, so rows that hold computation only always
    end. A batch posts all its operations in order and is done when all of them are. A send that nobody receives ends
    under `buffered`: `completeness.complete` reports it. A stage that computes on two ranks, or an unknown transport,
    is a `UsageError`.
    """
    table = as_schedule(schedule)
    if _plainly_ends(table, transport):
        done = np.broadcast_to(np.uint8(DONE), len(table))
        return Outcome(True, (), (), tuple(_last(table, done, rank) for rank in range(table.ranks)))
    wiring = wire(table, transport)
    rest = run(wiring.network)
    cycle = _Explanation(wiring, rest).cycle()
    return Outcome(
        finished=not cycle,
        cycle=cycle,
        mismatches=tuple(shortened(_mismatches(wiring, rest))),
        last=tuple(_last(table, rest.state, rank) for rank in range(table.ranks)),
    )


def ends(schedule: Schedule | Sequence[Row], transport: str) -> bool:
    """Whether it ends: `evaluate(schedule, transport).finished`, without the words."""
    table = as_schedule(schedule)
    if _plainly_ends(table, transport):
        return True
    wiring = wire(table, transport)
    through = bool((run(wiring.network).reached == wiring.network.queues[1:]).all())
    return through and not (wiring.posts and bool((wiring.partner == NOBODY).any()))


def sticks(schedule: Schedule, transport: str) -> Literal["in a cycle", "at a loss"] | None:
    """How it does not end: ranks wait for each other, or one waits for what does not exist; None where it ends."""
    if _plainly_ends(schedule, transport):
        return None
    wiring = wire(schedule, transport)
    explanation = _Explanation(wiring, run(wiring.network))
    if not explanation.cycle():
        return None
    return "at a loss" if explanation.lost else "in a cycle"


def _plainly_ends(schedule: Schedule, transport: str) -> bool:
    """Whether it ends with nothing swapped, where that is told without a network: a buffer only lets sends go on."""
    return transport in ("blocking", "buffered") and all_meet(schedule)


def _last(schedule: Schedule, state: NDArray[np.uint8], rank: int) -> Cell | None:
    begin, end = int(schedule.starts[rank]), int(schedule.starts[rank + 1])
    last = end - 1
    if last >= begin and (state[last] != DONE or schedule.op[last] == IDLE):
        done = np.flatnonzero((state[begin:end] == DONE) & (schedule.op[begin:end] != IDLE))
        last = begin + int(done[-1]) if len(done) else begin - 1
    if last < begin:
        return None
    first = last
    while schedule.joint[first] == NEXT:
        first -= 1
    return schedule.cell(first, last + 1)


def _mismatches(wiring: Wiring, rest: Rest) -> Iterator[str]:
    schedule = wiring.schedule
    columns = schedule.op, schedule.stage, schedule.microbatch, wiring.partner, rest.state
    for send in _swapped_loop(*columns) if available() else _swapped(*columns):
        receive = int(wiring.partner[send])
        from_rank, to_rank = schedule.place(send)[0], schedule.place(receive)[0]
        sent, expected = message(schedule, send), message(schedule, receive)
        yield f"rank {from_rank} sends {sent}, and rank {to_rank} receives it as {expected}"


def _swapped(
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    partner: NDArray[np.int32],
    state: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Sends that have met a receive of another name."""
    sends = np.flatnonzero(((op == SEND_F) | (op == SEND_B)) & (partner >= 0))
    receives = partner[sends]
    same = (op[receives] == op[sends] + 1) & (microbatch[receives] == microbatch[sends])
    same &= stage[receives] == stage[sends] + np.where(op[sends] == SEND_F, 1, -1)
    met = (state[sends] >= STARTED) & (state[receives] >= STARTED)
    found: NDArray[np.int64] = sends[met & ~same]
    return found


@loop
def _swapped_loop(
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    partner: NDArray[np.int32],
    state: NDArray[np.uint8],
) -> NDArray[np.int64]:
    found = np.empty(16, np.int64)
    size = 0
    for send in range(len(op)):
        receive = partner[send]
        if (op[send] != SEND_F and op[send] != SEND_B) or receive < 0 or state[send] == 0 or state[receive] == 0:
            continue
        step = 1 if op[send] == SEND_F else -1
        same = op[receive] == op[send] + 1 and microbatch[receive] == microbatch[send]
        if not same or stage[receive] != stage[send] + step:
            if size == len(found):
                found = np.append(found, np.empty(size, np.int64))
            found[size] = send
            size += 1
    return found[:size]


def message(schedule: Schedule, index: int) -> str:
    """Name of what a send gives away, or a receive or a computation expects: the computation that made it."""
    action = schedule.action(index)
    maker = action.stage if action.op.sends else action.peer
    return f"{maker}{'F' if action.op.forward else 'B'}{action.microbatch}"


class _Explanation:
    """Follows the waits of a network that has come to rest."""

    def __init__(self, wiring: Wiring, rest: Rest) -> None:
        self.wiring, self.rest = wiring, rest
        self.schedule, self.network = wiring.schedule, wiring.network
        self.lost = False

    def cycle(self) -> tuple[str, ...]:
        """The waits from the first stuck queue on, until one repeats or leads nowhere; empty where none is stuck."""
        stuck = np.flatnonzero(self.rest.reached < self.network.queues[1:])
        if not len(stuck):
            return self._left_over()
        path: dict[int, str] = {}
        queue, ahead_of = int(stuck[0]), NOTHING
        while queue not in path:
            waiter, target = self._wait(queue)
            path[queue] = self._sentence(waiter, target) + self._standing(queue, ahead_of)
            if target == NOBODY:
                self.lost = True
                return (f"{path[queue]}, {self._dead_end(waiter)}",)
            queue, ahead_of = int(self.wiring.queue_of[target]), target
        return tuple(path.values())[list(path).index(queue) :]

    def _left_over(self) -> tuple[str, ...]:
        """Where the host posts and goes on, what nobody meets is still awaited when the step ends."""
        if not self.wiring.posts or not (lost := np.flatnonzero(self.wiring.partner == NOBODY)).size:
            return ()
        first, self.lost = int(lost[0]), True
        return (f"{self._sentence(first, NOBODY)} when the step ends, {self._dead_end(first)}",)

    def _step(self, queue: int) -> list[int]:
        """Actions of the step at which the queue stands."""
        place, end = int(self.rest.reached[queue]), int(self.network.queues[queue + 1])
        places = [place]
        while len(self.network.opens) and place + 1 < end and not self.network.opens[place + 1]:
            place += 1
            places.append(place)
        return [int(self.network.order[place]) for place in places] if len(self.network.order) else places

    def _wait(self, queue: int) -> tuple[int, int]:
        """The action of the queue's step that waits, and what it waits for."""
        step = self._step(queue)
        starting = self.rest.state[step[0]] < STARTED
        needs, level = (self.network.before, DONE) if starting else (self.network.beside, STARTED)
        for action in step:
            need = int(needs[action])
            if need == NOBODY or (need != NOTHING and self.rest.state[need] < level):
                return action, need
        raise AssertionError(f"queue {queue} has nothing to wait for")

    def _sentence(self, waiter: int, target: int) -> str:
        action, rank = self.schedule.action(waiter), self.schedule.place(waiter)[0]
        peer = peer_rank(self.schedule, waiter)
        other = f"stage {action.peer}" if peer < 0 else "itself" if peer == rank else f"rank {peer}"
        if not action.op.exchanges:
            lost = f"it has received {message(self.schedule, waiter)} from {other}"
            until = lost if target == NOBODY else self._until(rank, target)
            return f"rank {rank} waits to compute {action} until {until}"
        verb, link = ("send", "to") if action.op.sends else ("receive", "from")
        sentence = f"rank {rank} waits to {verb} {message(self.schedule, waiter)} {link} {other}"
        own = target in (NOBODY, int(self.wiring.partner[waiter]))
        return sentence if own else f"{sentence} until {self._until(rank, target)}"

    def _until(self, rank: int, target: int) -> str:
        action, other = self.schedule.action(target), self.schedule.place(target)[0]
        who = "it" if other == rank else f"rank {other}"
        if not action.op.exchanges:
            return f"{who} has computed {action}"
        return f"{who} has {'sent' if action.op.sends else 'received'} {message(self.schedule, target)}"

    def _standing(self, queue: int, behind: int) -> str:
        """Why a queue is asked of at all, where that is not plain: it is a stream, and `behind` stands further back."""
        if not len(self.network.order) or behind == NOTHING or behind in self._step(queue):
            return ""
        action = self.schedule.action(behind)
        if not action.op.exchanges:
            return f", before it computes {action}"
        return f", before it {'sends' if action.op.sends else 'receives'} {message(self.schedule, behind)}"

    def _dead_end(self, waiter: int) -> str:
        peer = peer_rank(self.schedule, waiter)
        if peer < 0:
            return "which no rank computes"
        begin, end = self.schedule.starts[peer], self.schedule.starts[peer + 1]
        if not self.wiring.posts and (self.rest.state[begin:end] == DONE).all():
            return "which has finished"
        return f"which has no {'receive' if self.schedule.action(waiter).op.sends else 'send'} left for it"
