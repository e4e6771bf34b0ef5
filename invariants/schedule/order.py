"""Whether lowered rows end, decided by one evaluation: which rank waits for which, and what is swapped.

Such programs have no choice. Messages of an ordered pair of ranks are first in, first out, and each rank posts in
program order, so the k-th send of a pair meets the k-th receive whatever the speed of the ranks, and a rank that can go
on stays able to. The evaluation is linear in the number of actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, get_args

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Cell, Row, actions_of, placement
from invariants.schedule.table import Schedule, as_schedule

Transport = Literal["buffered", "blocking"]
"""When a send is done: at once, whatever is in flight; or when its receive has been posted (rendezvous).

`blocking` is what MPI calls the synchronous mode, and what gloo's `send` does. Code that needs buffers to end is not
portable (MPI 4.1, section 3.5).
"""


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


def evaluate(schedule: Schedule | Sequence[Row], transport: Transport) -> Outcome:
    """Run the rows, one a rank, in program order.

    A computation takes no time and waits for nothing, so rows that hold computation only always end. A receive waits
    until its send has been posted; a batch posts all its operations in order and is done when all of them are. A send
    that nobody receives ends under `buffered`: `completeness.complete` reports it. A stage that computes on two ranks,
    or an unknown transport, is a `UsageError`.
    """
    if transport not in get_args(Transport):
        raise UsageError(f"transport {transport!r}: expected one of {', '.join(get_args(Transport))}")
    rows = as_schedule(schedule).rows()
    pairs = _match(rows)
    needs = _needs(pairs, transport)
    reached = _run(rows, needs)
    stuck = [rank for rank, row in enumerate(rows) if reached[rank] < len(row)]
    return Outcome(
        finished=not stuck,
        cycle=_explain(stuck[0], rows, needs, reached) if stuck else (),
        mismatches=tuple(_mismatches(pairs, reached)),
        last=tuple(row[reached[rank] - 1] if reached[rank] else None for rank, row in enumerate(rows)),
    )


@dataclass(frozen=True)
class _Posting:
    """One send or receive in its place; `peer` is the rank at the other end, None where no rank holds that stage."""

    rank: int
    column: int
    action: Action
    peer: int | None

    @property
    def message(self) -> tuple[bool, int, int]:
        """What is sent or expected: whether an activation, the stage that made it, the microbatch."""
        action = self.action
        return action.op.forward, action.stage if action.op.sends else action.peer, action.microbatch

    def __str__(self) -> str:
        forward, stage, microbatch = self.message
        return f"{stage}{'F' if forward else 'B'}{microbatch}"


_Pair = tuple[_Posting | None, _Posting | None]
"""The k-th send and the k-th receive of an ordered pair of ranks; None where that side has no k-th."""

_Needs = Mapping[tuple[int, int], Sequence[tuple[_Posting, _Posting | None]]]
"""By rank and column: what the cell posts, each with the posting that it waits for; None where there is none."""


def _match(rows: Sequence[Row]) -> list[_Pair]:
    ranks = placement(rows)
    channels: dict[tuple[int, int], tuple[list[_Posting], list[_Posting]]] = defaultdict(lambda: ([], []))
    pairs: list[_Pair] = []
    for rank, row in enumerate(rows):
        for column, cell in enumerate(row):
            for action in actions_of(cell):
                if action.op.computes:
                    continue
                posting = _Posting(rank, column, action, ranks.get(action.peer))
                if posting.peer is None:
                    pairs.append((posting, None) if action.op.sends else (None, posting))
                elif action.op.sends:
                    channels[rank, posting.peer][0].append(posting)
                else:
                    channels[posting.peer, rank][1].append(posting)
    for sends, receives in channels.values():
        pairs += zip_longest(sends, receives)
    return pairs


def _needs(pairs: Sequence[_Pair], transport: Transport) -> _Needs:
    needs: dict[tuple[int, int], list[tuple[_Posting, _Posting | None]]] = defaultdict(list)
    for send, receive in pairs:
        if receive:
            needs[receive.rank, receive.column].append((receive, send))
        if send and transport == "blocking":
            needs[send.rank, send.column].append((send, receive))
    return dict(needs)


def _run(rows: Sequence[Row], needs: _Needs) -> list[int]:
    """Column that each rank gets to, and waits at; the length of its row where it ends."""
    reached = [0] * len(rows)
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        while reached[rank] < len(rows[rank]):
            wait = _unmet(rank, needs, reached)
            if wait:
                partner = wait[1]
                if partner:
                    waiting[partner.rank, partner.column].append(rank)
                break
            reached[rank] += 1
            ready += waiting.pop((rank, reached[rank]), ())
    return reached


def _unmet(rank: int, needs: _Needs, reached: Sequence[int]) -> tuple[_Posting, _Posting | None] | None:
    """What keeps `rank` from leaving the cell that it has reached; None where nothing does."""
    for posting, partner in needs.get((rank, reached[rank]), ()):
        if partner is None or reached[partner.rank] < partner.column:
            return posting, partner
    return None


def _explain(start: int, rows: Sequence[Row], needs: _Needs, reached: Sequence[int]) -> tuple[str, ...]:
    """Follow the waits from the rank `start` until one repeats, or leads nowhere."""
    path: dict[int, str] = {}
    rank = start
    while rank not in path:
        wait = _unmet(rank, needs, reached)
        assert wait, f"rank {rank} has nothing to wait for"
        posting, partner = wait
        path[rank] = _sentence(posting)
        if partner is None:
            return (f"{path[rank]}, {_dead_end(posting, rows, reached)}",)
        rank = partner.rank
    return tuple(path.values())[list(path).index(rank) :]


def _sentence(posting: _Posting) -> str:
    verb, link = ("send", "to") if posting.action.op.sends else ("receive", "from")
    if posting.peer is None:
        other = f"stage {posting.action.peer}"
    else:
        other = "itself" if posting.peer == posting.rank else f"rank {posting.peer}"
    return f"rank {posting.rank} waits to {verb} {posting} {link} {other}"


def _dead_end(posting: _Posting, rows: Sequence[Row], reached: Sequence[int]) -> str:
    if posting.peer is None:
        return "which no rank computes"
    if reached[posting.peer] == len(rows[posting.peer]):
        return "which has finished"
    return f"which has no {'receive' if posting.action.op.sends else 'send'} left for it"


def _mismatches(pairs: Sequence[_Pair], reached: Sequence[int]) -> Iterator[str]:
    for send, receive in pairs:
        if not send or not receive or send.message == receive.message:
            continue
        if reached[send.rank] >= send.column and reached[receive.rank] >= receive.column:
            yield f"rank {send.rank} sends {send}, and rank {receive.rank} receives it as {receive}"
