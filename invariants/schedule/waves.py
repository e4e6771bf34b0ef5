"""The way through numpy: a cell of every rank that can go on, then of every rank that can go on then."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.table import NEXT, B, F, W


class Program(NamedTuple):
    """What is run: columns of the schedule, where its stages are, and the times; arrays as in their classes."""

    starts: NDArray[np.int64]
    op: NDArray[np.uint8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    joint: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    home: NDArray[np.int32]
    cells: NDArray[np.int64]
    took: NDArray[Any]
    pair: NDArray[Any]
    link: NDArray[np.int32]
    transfer: NDArray[Any]
    latency: NDArray[Any]
    links: int
    hold: bool


class Trace(NamedTuple):
    """What comes out, for the C computations of a schedule.

    `places` [C] (int32) in the schedule. `start`, `end`, `arrives` [C+1]: when it begins, is done, and when its result
    is where it is needed (`end` itself where messages cost nothing); the last entry stands for what exists from the
    beginning, at time 0. `made` [2, S+1, M] (int32): which computation made the output of stage s, in `made[0, s+1]`,
    and the gradient of its input, in `made[1, s]`; -1 where none did, C for what exists from the beginning, the input
    of the first stage and the gradient of the last one's output. `busy` [R]: time for which each rank computes.
    `stopped` [R] (int64): the action at which each rank waits for ever, its last one plus one where it ends.
    """

    places: NDArray[np.int32]
    start: NDArray[Any]
    end: NDArray[Any]
    arrives: NDArray[Any]
    made: NDArray[np.int32]
    busy: NDArray[Any]
    stopped: NDArray[np.int64]


def run_in_waves(p: Program, t: Trace) -> None:
    """Fill the trace of a program; see `simulation.run`."""
    t.places[:] = np.flatnonzero(p.op <= B)
    op, stage = p.op[t.places], p.stage[t.places]
    need, own, make = _addresses(p, t)
    lead, cost = _cells(p, t, op, stage)
    sizes = np.diff(lead)
    width = int(sizes.max(initial=0))
    made, home = t.made.ravel(), np.append(p.home, -1)
    free, queue, waits = np.zeros_like(t.busy), np.zeros(p.links, t.busy.dtype), np.full(len(t.busy), -1)
    bounds = np.searchsorted(lead, p.offsets)
    cell, stop = bounds[:-1].copy(), bounds[1:]
    active = np.flatnonzero(cell < stop)
    while len(active):
        first, size, ready = lead[cell[active]], sizes[cell[active]], free[active]
        missing = np.full(len(active), -1)
        for place in range(width):
            part = first + np.minimum(place, size - 1)
            maker = made[need[part]]
            missing = np.where((missing < 0) & ((maker < 0) | (made[own[part]] < 0)), need[part], missing)
            ready = np.maximum(ready, t.arrives[maker])
        waits[active] = missing
        goes = missing < 0
        active, first, size, ready = active[goes], first[goes], size[goes], ready[goes]
        done = ready + cost[cell[active]]
        t.busy[active] += cost[cell[active]]
        free[active] = done
        cell[active] += 1
        following = [active[cell[active] < stop[active]]]
        for place in range(width):
            has = size > place
            part, rank = first[has] + place, active[has]
            t.start[part], t.end[part], t.arrives[part] = ready[has], done[has], done[has]
            fresh = (op[part] != W) & (made[make[part]] < 0)
            part, rank = part[fresh], rank[fresh]
            made[make[part]] = part
            forward = op[part] == F
            if p.links:
                _send(p, t, part, rank, free, queue, np.where(forward, 0, 1), stage[part])
            to = home[stage[part] + np.where(forward, 1, -1)]
            woken = to[waits[to] == make[part]]
            waits[woken] = -1
            following.append(woken)
        active = np.concatenate(following)
    t.stopped[:] = np.where(cell < stop, np.append(t.places, 0)[lead[cell]], p.starts[1:])


def _send(
    p: Program,
    t: Trace,
    part: NDArray[np.int64],
    rank: NDArray[np.int64],
    free: NDArray[Any],
    queue: NDArray[Any],
    kind: NDArray[np.int64],
    stage: NDArray[np.int32],
) -> None:
    """Send the results that cross ranks: at most one a rank, so at most one a link."""
    message = np.flatnonzero(p.link[kind, stage] >= 0)
    part, rank, kind, stage = part[message], rank[message], kind[message], stage[message]
    link = p.link[kind, stage]
    queue[link] = sent = np.maximum(free[rank], queue[link]) + p.transfer[kind, stage]
    t.arrives[part] = sent + p.latency[kind, stage]
    if p.hold:
        free[rank] = sent


def _addresses(p: Program, t: Trace) -> list[NDArray[Any]]:
    """Of each computation, the entries of `made` that it needs, from elsewhere and its own, and that it makes."""
    kind: type[np.integer[Any]] = np.int32 if t.made.size < 2**31 else np.int64
    op, entry = p.op[t.places], p.stage[t.places].astype(kind)
    entry *= t.made.shape[2]
    entry += p.microbatch[t.places]
    return [entry + rows.astype(kind)[op] for rows in p.cells]


def _cells(
    p: Program, t: Trace, op: NDArray[np.uint8], stage: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The computation with which each cell opens, and the end; and what each cell takes."""
    opens = p.joint[t.places] != NEXT
    opens[1:] |= np.diff(t.places) > 1
    opens[p.offsets[:-1][np.diff(p.offsets) > 0]] = True
    lead = np.append(np.flatnonzero(opens), len(opens))
    if len(opens) == 0:
        return lead, np.zeros(0, t.busy.dtype)
    cost = np.add.reduceat(p.took[op, stage], lead[:-1])
    pair = p.pair[stage[lead[:-1]]]
    return lead, np.where((np.diff(lead) > 1) & (pair >= 0), pair, cost)
