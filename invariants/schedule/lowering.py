"""Lowering: computation in, the same order with sends and receives out.

A message between stages on different ranks is sent right after the computation that made it, and received right before
the one that needs it. What is left to choose is the order of a send and a receive that fall between the same two
computations and *cross*: they go to and come from one peer, and the peer makes what we wait for before it needs what
we send. If both sides send first and sends are rendezvous, both wait for ever. GPipe has no crossing, so these
lowerings of it are the same, and free of deadlock. In 1F1B the steady pairs cross.

Families whose ranks hold several stages cross in more ways than two neighbours do. `in-order` is free of deadlock for
all of them: it receives a message as soon as it has been made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.actions import Row
from invariants.schedule.common_order import merge, times
from invariants.schedule.compiled import available
from invariants.schedule.placing import placed
from invariants.schedule.table import (
    FIRST,
    IDLE,
    NEXT,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    Schedule,
    as_schedule,
)
from invariants.schedule.timeline import NeverEnds, simulate

LOWERINGS: Final = {
    "receive-first": (
        "Where they cross, receive the gradient before sending the activation, and send the gradient before receiving "
        "the activation. The next stage computes the gradient first anyway, so the activation comes no later than it "
        "is needed: 1F1B ends under rendezvous sends, at the same makespan."
    ),
    "textbook": "Send first. Where two neighbours cross, both wait: 1F1B never ends under rendezvous sends, N, M >= 2.",
    "even-first": "Even ranks send first, odd ranks receive first; needs neighbouring stages on ranks of other parity.",
    "batched": (
        "Post both together and wait for both: what `Schedule1F1B` of torch 2.13 does, which asks for M >= N. Sends "
        "alone, or receives alone, are posted one by one, as torch does since pytorch PR 175712."
    ),
    "in-order": (
        "All ranks post their messages in one common order: by the time at which they are made, with F = I = W = 1 and "
        "no latency. The earliest message that is not through has nothing before it on either side, so every transport "
        "gets through, for every schedule whose computations end. With rendezvous sends it may take longer than needed."
    ),
}
"""What each lowering does, by its name."""


_RULES: Final = ("textbook", "receive-first", "even-first")
"""Lowerings that a compiled loop knows, by their numbers there."""


def lower(schedule: Schedule | Sequence[Row], how: str) -> Schedule:
    """Add the sends and receives to a schedule that holds computation only, in the order that `how` names.

    Stages that share a rank exchange nothing. Empty cells are left out, as torch leaves them out: they would part two
    computations whose messages cross. UNSHARD, RESHARD and REDUCE_GRAD stay, and do part them. Whether what comes out
    ends, `order.evaluate` decides: only `in-order` promises it. A lowering that does not exist, a schedule that
    communicates already or that has a stage on two ranks, and, for `in-order`, one whose computations never end, are
    each a `UsageError`.
    """
    if how not in LOWERINGS:
        raise UsageError(f"lowering {how!r}: expected one of {', '.join(LOWERINGS)}")
    table = as_schedule(schedule)
    if table.communicates:
        index = int(np.flatnonzero(table.exchanges)[0])
        place = f"rank {table.place(index)[0]}, column {table.column(index)}"
        raise UsageError(f"schedule: {table.action(index)} at {place}: expected computation only to lower")
    if (table.op == IDLE).any():
        table = table.kept(table.op != IDLE)
    if available() and not table.joint.any() and how in _RULES:
        return placed(table, *_asked(table.placement), _RULES.index(how))
    asked = _exchanges(table)
    if how == "in-order":
        return _in_order(table, *asked)
    return _between(table, *asked, how)


def _exchanges(table: Schedule) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Code of the send and of the receive that each action asks for [A]; 0, which is F, where it asks for none."""
    of_sends, of_receives = _asked(table.placement)
    here = np.flatnonzero(table.computes & (table.stage >= 0))
    sends, receives = np.zeros(len(table), np.uint8), np.zeros(len(table), np.uint8)
    sends[here] = of_sends[table.op[here], table.stage[here]]
    receives[here] = of_receives[table.op[here], table.stage[here]]
    return sends, receives


def _asked(placement: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """`_exchanges` by the computation's code and its stage [4, S]."""
    sends, receives = np.zeros((2, B + 1, len(placement)), np.uint8)
    crosses = (placement[:-1] != placement[1:]) & (placement[:-1] >= 0) & (placement[1:] >= 0)
    sends[F, :-1][crosses], receives[F, 1:][crosses] = SEND_F, RECV_F
    for code in (I, B):
        sends[code, 1:][crosses], receives[code, :-1][crosses] = SEND_B, RECV_B
    return sends, receives


def _in_order(table: Schedule, sends: NDArray[np.uint8], receives: NDArray[np.uint8]) -> Schedule:
    try:
        timeline = simulate(table)
    except NeverEnds as error:
        raise UsageError(f"lowering in-order: {error}; expected an order of computation that ends") from None
    start, end = times(table, timeline)
    if available():
        added = np.append(0, np.cumsum((sends > 0).astype(np.int64) + (receives > 0)))
        columns = merge(table.starts, table.columns[1:], sends, receives, table.makers, start, end)
        return Schedule.of_arrays(np.diff(table.starts + added[table.starts]), *columns)
    sending, receiving = np.flatnonzero(sends), np.flatnonzero(receives)
    maker = _at_other_end(table, receives, receiving)
    known = maker >= 0
    # At one time, messages come before computations, in the order of those that made them.
    time = np.concatenate([start, end[sending], np.where(known, end[maker], start[receiving])])
    computes = np.arange(len(time)) < len(table)
    name = np.concatenate([np.arange(len(table)), sending, np.where(known, maker, receiving)])
    return _arranged(table, sends, receives, (name, computes, time))


def _between(table: Schedule, sends: NDArray[np.uint8], receives: NDArray[np.uint8], how: str) -> Schedule:
    """Place messages between the computations that make and need them; `how` decides where two cross."""
    ahead = np.zeros(len(table), np.bool_)  # computations whose receive comes before the send that it crosses
    sent, received = np.zeros((2, len(table)), np.bool_)  # computations whose send, or receive, goes into a batch
    for earlier, later in _neighbours(table, sends, receives):
        if how == "receive-first":
            ahead[later[sends[earlier] == SEND_F]] = True
        elif how == "even-first":
            ahead[later[table.rank[later] % 2 == 1]] = True
        elif how == "batched":
            sent[earlier] = received[later] = True
    if not sent.any() and not table.joint.any():
        return _placed(table, sends, receives, ahead)
    sending, receiving = np.flatnonzero(sends), np.flatnonzero(receives)
    cell = np.cumsum(table.joint != NEXT)
    place = np.concatenate([2 * cell, 2 * cell[sending] + 1, 2 * cell[receiving] - 1])
    turns = np.where(sent[sending], 2, 1), np.where(received[receiving], 3, np.where(ahead[receiving], 0, 4))
    turn = np.concatenate([np.zeros(len(table), np.int64), *turns])
    name = np.concatenate([np.arange(len(table)), sending, receiving])
    batched = np.concatenate([np.zeros(len(table), np.bool_), sent[sending], received[receiving]])
    return _arranged(table, sends, receives, (name, turn, place), np.where(batched, place, 0))


def _arranged(
    table: Schedule,
    sends: NDArray[np.uint8],
    receives: NDArray[np.uint8],
    keys: tuple[NDArray[Any], ...],
    batch: NDArray[np.int64] | None = None,
) -> Schedule:
    """The actions, the sends and the receives that they ask for, sorted by rank and `keys`, the last one first.

    What has the same number in `batch` makes one cell; 0 is none.
    """
    sending, receiving = np.flatnonzero(sends), np.flatnonzero(receives)
    source = np.concatenate([np.arange(len(table)), sending, receiving])
    order = _sorted(*keys, table.rank[source])
    source = source[order]
    op = np.concatenate([table.op, sends[sending], receives[receiving]])[order]
    joint = np.concatenate([table.joint, np.zeros(len(source) - len(table), np.uint8)])[order]
    if batch is not None:
        batch = batch[order]
        joint[batch > 0] = FIRST
        joint[1:][(batch[1:] > 0) & (batch[1:] == batch[:-1])] = NEXT
    lengths = np.bincount(table.rank[source], minlength=table.ranks)
    return Schedule.of_arrays(lengths, op, table.stage[source], table.microbatch[source], joint)


def _sorted(*keys: NDArray[Any]) -> NDArray[np.int64]:
    """`np.lexsort`, the last key first; by one number, which is faster, where the keys fit into it."""
    packed, width = np.zeros(len(keys[0]), np.int64), 0
    for key in keys:
        low, high = int(key.min(initial=0)), int(key.max(initial=0))
        packed += (key.astype(np.int64) - low) << min(width, 62)
        width += (high - low).bit_length()
    if width > 62 or any(key.dtype.kind == "f" for key in keys):
        return np.lexsort(keys)
    return np.argsort(packed, kind="stable")


def _placed(
    table: Schedule, sends: NDArray[np.uint8], receives: NDArray[np.uint8], ahead: NDArray[np.bool_]
) -> Schedule:
    """The same where every action is a cell and nothing is batched, by counting instead of sorting."""
    begins = table.starts[:-1][np.diff(table.starts) > 0]
    sent = np.zeros(len(table), np.bool_)  # whether the action before, on the same rank, sends
    sent[1:] = sends[:-1] > 0
    sent[begins] = False
    received = receives > 0
    width = 1 + (sends > 0) + received.astype(np.int64)
    ends = np.cumsum(width)
    starts = np.r_[0, ends][table.starts]
    here = ends - 1 - (sends > 0)
    size = int(starts[-1])
    source, op = np.empty(size, np.int32), np.empty(size, np.uint8)
    source[here], op[here] = np.arange(len(table), dtype=np.int32), table.op
    sending = np.flatnonzero(sends)
    after = here[sending] + 1
    after[np.append(ahead & sent, False)[sending + 1]] += 1
    source[after], op[after] = sending, sends[sending]
    receiving = np.flatnonzero(received)
    first = here[receiving] - 1 - (ahead & sent)[receiving]
    source[first], op[first] = receiving, receives[receiving]
    return Schedule.of_arrays(np.diff(starts), op, table.stage[source], table.microbatch[source])


def _neighbours(
    table: Schedule, sends: NDArray[np.uint8], receives: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs of computations in cells that follow each other, where the send of the first crosses the receive of the
    second, as two columns of indices.
    """
    if not table.joint.any():
        pairs = [(np.arange(len(table) - 1), np.arange(1, len(table)))]
    else:
        begins = np.flatnonzero(table.joint != NEXT)
        sizes = np.diff(np.r_[begins, len(table)])
        widest = range(int(sizes.max(initial=0)))
        pairs = []
        for i, j in product(widest, widest):
            both = np.flatnonzero((sizes[:-1] > i) & (sizes[1:] > j))
            pairs.append((begins[both] + i, begins[both + 1] + j))
    for earlier, later in pairs:
        asked = (sends[earlier] > 0) & (receives[later] > 0) & (table.rank[earlier] == table.rank[later])
        earlier, later = earlier[asked], later[asked]
        makes, needs = _at_other_end(table, receives, later), _at_other_end(table, sends, earlier)
        crosses = (makes >= 0) & (needs >= 0) & (makes < needs) & (table.rank[makes] == table.rank[needs])
        yield earlier[crosses], later[crosses]


def _at_other_end(table: Schedule, asked: NDArray[np.uint8], here: NDArray[np.int64]) -> NDArray[np.int32]:
    """Index of the computation that makes what each action of `here` receives, or needs what it sends; -1: none."""
    code = asked[here]
    step = np.where((code == SEND_F) | (code == RECV_B), 1, -1)
    forward = ((code == SEND_F) | (code == RECV_F)).astype(np.int64)
    found: NDArray[np.int32] = table.makers[table.stage[here] + step, forward, table.microbatch[here]]
    return found
