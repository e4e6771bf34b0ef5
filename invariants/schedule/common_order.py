"""Sends and receives put between a rank's computations by one order that all ranks share: the time of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.compiled import loop
from invariants.schedule.table import ALONE, RECV_F, Schedule
from invariants.schedule.timeline import Timeline


def times(table: Schedule, timeline: Timeline) -> tuple[NDArray[Any], NDArray[Any]]:
    """Start and end of every action [A]; what takes no time stands at the end of the computation before it."""
    start, end = np.zeros(len(table), timeline.start.dtype), np.zeros(len(table), timeline.start.dtype)
    start[timeline.index], end[timeline.index] = timeline.start, timeline.end
    computed = np.maximum.accumulate(np.where(table.computes, np.arange(len(table)), -1))
    still = ~table.computes & (computed >= table.starts[table.rank])
    start[still] = end[still] = end[computed[still]]
    return start, end


@loop
def merge(
    starts: NDArray[np.int64],
    columns: tuple[NDArray[Any], ...],
    sends: NDArray[np.uint8],
    receives: NDArray[np.uint8],
    makers: NDArray[np.int32],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]:
    """Columns of what comes out, rank after rank; a message has the time at which it is made.

    `columns` are those of `Schedule` without `starts`, `sends` and `receives` [A] what each action asks for, or 0,
    `start` and `end` [A] ticks. At one time messages come first, in the order of the computations that made them.
    """
    op, stage, microbatch, joint = columns
    size = len(op) + np.count_nonzero(sends) + np.count_nonzero(receives)
    (codes, parts), (places, numbers) = np.empty((2, size), np.uint8), np.empty((2, size), np.int32)
    out = 0
    for rank in range(len(starts) - 1):
        last = starts[rank + 1]
        who = np.flatnonzero(receives[starts[rank] : last]) + starts[rank]
        time, name = np.empty(len(who), np.int64), np.empty(len(who), np.int64)
        for turn in range(len(who)):
            i = who[turn]
            forward = receives[i] == RECV_F
            maker = makers[stage[i] + (-1 if forward else 1), 1 if forward else 0, microbatch[i]]
            time[turn], name[turn] = (end[maker], maker) if maker >= 0 else (start[i], i)
        order = np.argsort(name)
        order = order[np.argsort(time[order], kind="mergesort")]
        received, sent = 0, starts[rank]
        for i in range(starts[rank], last + 1):  # the last turn is for what is left
            while True:
                while sent < last and sends[sent] == 0:
                    sent += 1
                send, receive = sent < last, received < len(order)
                if send and receive:
                    k = order[received]
                    send = end[sent] < time[k] or (end[sent] == time[k] and sent < name[k])
                elif not send and not receive:
                    break
                if i < last and (end[sent] if send else time[order[received]]) > start[i]:
                    break
                of = sent if send else who[order[received]]
                codes[out], parts[out] = sends[of] if send else receives[of], ALONE
                places[out], numbers[out] = stage[of], microbatch[of]
                out, sent, received = out + 1, sent + send, received + (not send)
            if i < last:
                codes[out], places[out], numbers[out], parts[out] = op[i], stage[i], microbatch[i], joint[i]
                out += 1
    return codes, places, numbers, parts
