"""The way through numpy: a cell of every rank that can go on, then of every rank that can go on then."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.table import F, W


class Program(NamedTuple):
    """What is run: arrays as in `Computations` and `Ticks`.

    `cells` [3, 4]: how far the entry of `Trace.made` that a computation needs from elsewhere, the one that it needs of
    its own stage, and the one that it makes lie from `stage << bits | microbatch`, by operation.
    """

    code: NDArray[Any]
    bits: int
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
    """What comes out, for C computations of S stages.

    `end`, `arrives` [C+1]: when each is done, and when its result is where it is needed (`end` itself where messages
    cost nothing); the last entry stands for what exists from the beginning, at time 0. `made` [2, S+1, 2^bits] (int32):
    which computation made the output of stage s, in `made[0, s+1]`, and the gradient of its input, in `made[1, s]`; -1
    where none did, C for what exists from the beginning, the input of the first stage and the gradient of the last
    one's output. `begin` and `busy` [R]: when each rank begins, and for how long it computes. `stopped` [R] (int64):
    the computation at which each rank waits for ever, its last one plus one where it ends.
    """

    end: NDArray[Any]
    arrives: NDArray[Any]
    made: NDArray[np.int32]
    begin: NDArray[Any]
    busy: NDArray[Any]
    stopped: NDArray[np.int64]


def run_in_waves(p: Program, t: Trace) -> None:
    """Fill the trace of a program; see `simulation.run`."""
    op, entry = p.code & 3, p.code >> 3
    stage = entry >> p.bits
    need, own, make = (entry + row.astype(entry.dtype)[op] for row in p.cells)
    lead, cost = cells(p.code, p.bits, p.took, p.pair)
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
            ready = np.maximum(ready, np.where(op[part] == W, 0, t.arrives[maker]))
        waits[active] = missing
        goes = missing < 0
        active, first, size, ready = active[goes], first[goes], size[goes], ready[goes]
        time = cost[cell[active]]
        begins = first == p.offsets[active]
        t.begin[active[begins]] = ready[begins]
        t.busy[active] += time
        free[active] = done = ready + time
        cell[active] += 1
        following = [active[cell[active] < stop[active]]]
        for place in range(width):
            has = size > place
            part, rank = first[has] + place, active[has]
            t.end[part] = t.arrives[part] = done[has]
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
    t.stopped[:] = lead[cell]


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


def cells(
    code: NDArray[Any], bits: int, took: NDArray[Any], pair: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The computation with which each cell begins, and the end; and what each cell takes."""
    begins = np.flatnonzero(code & 4)
    lead = np.append(begins, len(code))
    if len(begins) == 0:
        return lead, np.zeros(0, took.dtype)
    stage = code >> (bits + 3)
    cost = np.add.reduceat(took[code & 3, stage], begins)
    overlapped = pair[stage[begins]]
    return lead, np.where((np.diff(lead) > 1) & (overlapped >= 0), overlapped, cost)
