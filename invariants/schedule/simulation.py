"""The evaluation behind a timeline: each rank's computations in order, each as soon as its data exist.

Such programs have no choice, so whatever order the ranks are visited in, the times come out the same: the compiled loop
follows one rank until it must wait; `waves`, the way without numba, takes a cell of every rank that can go on at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import uint32, uint64
from numpy.typing import NDArray

from invariants.schedule.compiled import available, loop
from invariants.schedule.computations import Computations
from invariants.schedule.costs import Ticks
from invariants.schedule.memory import zeros
from invariants.schedule.table import F, W
from invariants.schedule.waves import Program, Trace, run_in_waves


def run(work: Computations, times: Ticks, hold: bool) -> Trace:
    """Run computations at their prices; `hold`: a rank computes nothing while its message occupies the link."""
    size, stages, kind = len(work.code), len(work.home), times.took.dtype
    end, made = zeros(size + 1, kind), zeros((2, stages + 1, 1 << work.bits), np.int32)
    made.fill(-1)
    made[0, 0] = made[1, stages] = size
    trace = Trace(
        end=end,
        arrives=zeros(size + 1, kind) if times.links else end,
        made=made,
        begin=np.zeros(len(work.offsets) - 1, kind),
        busy=np.zeros(len(work.offsets) - 1, kind),
        stopped=work.offsets[:-1].copy(),
    )
    # Rows of `made`, counted from that of the stage itself: F, I, W, B.
    gradient = stages + 1
    rows = np.array([[0, gradient + 1, gradient, gradient + 1], [0, 1, gradient, 1], [1, gradient, 0, gradient]])
    prices = times.took, times.pair, times.link, times.transfer, times.latency
    program = Program(*work[:4], rows << work.bits, *prices, len(times.links), hold)
    if available() and work.alone and not times.links:
        given = work.code.view(f"u{work.code.itemsize}"), *work[1:4], (rows << work.bits).astype(np.uint64), times.took
        _run_plain(*given, end, made.ravel(), trace.begin, trace.busy, trace.stopped)
    elif available():
        _run_compiled(program, trace)
    else:
        run_in_waves(program, trace)
    return trace


@loop
def _run_compiled(program: Program, trace: Trace) -> None:
    # Out of the tuples first: taking an array out of one counts a reference, and costs more than a step.
    code, bits, offsets, home, cells, took, pair, link_of, transfer, latency, links, hold = program
    end, arrives, table, begin, busy, stopped = trace
    needs, owns, makes, made = cells[0], cells[1], cells[2], table.ravel()
    ranks, stages = len(busy), len(home)
    free, queue = np.zeros_like(busy), np.zeros(links, busy.dtype)
    todo, left, waits = np.arange(ranks)[::-1].copy(), ranks, np.full(ranks, -1)
    while left:
        left -= 1
        rank = todo[left]
        here, stop, now = stopped[rank], offsets[rank + 1], free[rank]
        while here < stop:
            ready, cost, last = now, now * 0, here
            while last < stop and (last == here or not code[last] & 4):
                op, cell = code[last] & 3, code[last] >> 3
                need = made[cell + needs[op]]
                if need < 0 or made[cell + owns[op]] < 0:
                    waits[rank] = cell + needs[op]
                    break
                if op != W:
                    ready = max(ready, arrives[need])
                cost += took[op, cell >> bits]
                last += 1
            if waits[rank] >= 0:
                break
            if last - here > 1 and pair[code[here] >> 3 >> bits] >= 0:
                cost = pair[code[here] >> 3 >> bits]
            busy[rank] += cost
            if here == offsets[rank]:
                begin[rank] = ready
            now = done = ready + cost
            for place in range(here, last):
                op, cell = code[place] & 3, code[place] >> 3
                end[place] = arrives[place] = done
                stage, cell = cell >> bits, cell + makes[op]
                if op != W and made[cell] < 0:
                    made[cell] = place
                    kind, to = (0, stage + 1) if op == F else (1, stage - 1)
                    link = link_of[kind, stage]
                    if link >= 0:
                        queue[link] = sent = max(now, queue[link]) + transfer[kind, stage]
                        arrives[place] = sent + latency[kind, stage]
                        now = sent if hold else done
                    if 0 <= to < stages and waits[home[to]] == cell:
                        waits[home[to]] = -1
                        todo[left] = home[to]
                        left += 1
            here = last
        stopped[rank], free[rank] = here, now


@loop
def _run_plain(
    code: NDArray[Any],
    bits: int,
    offsets: NDArray[np.int64],
    home: NDArray[np.int32],
    cells: NDArray[np.uint64],
    took: NDArray[Any],
    end: NDArray[Any],
    made: NDArray[np.int32],
    begin: NDArray[Any],
    busy: NDArray[Any],
    stopped: NDArray[np.int64],
) -> None:
    """The same without compound cells, and with messages that cost nothing."""
    needs, owns, makes, ranks, stages = cells[0], cells[1], cells[2], len(busy), len(home)
    free, todo, left = np.zeros_like(busy), np.arange(ranks)[::-1].astype(np.uint32), ranks
    nothing = uint64(made.size)
    at, waits = offsets[:-1].astype(np.uint32), np.full(ranks, nothing)
    while left:
        left -= 1
        rank = todo[uint32(left)]
        here, stop, now = at[rank], uint32(offsets[rank + 1]), free[rank]
        while here < stop:
            op, cell = code[here] & 3, uint64(code[here] >> 3)
            stage, need = cell >> uint64(bits), made[cell + needs[op]]
            if need < 0 or made[cell + owns[op]] < 0:
                waits[rank] = cell + needs[op]
                break
            if op != W and end[uint32(need)] > now:
                now = end[uint32(need)]
            if here == offsets[rank]:
                begin[rank] = now
            cost, own = took[op, stage], cell + makes[op]
            busy[rank] += cost
            now += cost
            end[here] = now
            if op != W and made[own] < 0:
                made[own] = here
                to = uint32(stage + uint64(1)) if op == F else uint32(stage - uint64(1))
                if to < stages and waits[uint32(home[to])] == own:
                    waits[uint32(home[to])] = nothing
                    todo[uint32(left)] = home[to]
                    left += 1
            here = uint32(here + 1)
        at[rank], free[rank] = here, now
    stopped[:] = at
