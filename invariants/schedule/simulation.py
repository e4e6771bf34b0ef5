"""The evaluation behind a timeline: each rank's computations in order, each as soon as its data exist.

Such programs have no choice, so whatever order the ranks are visited in, the times come out the same: the compiled loop
follows one rank until it must wait; `waves`, the way without numba, takes a cell of every rank that can go on at once.
"""

from __future__ import annotations

import numpy as np

from invariants.schedule.compiled import available, loop
from invariants.schedule.costs import Ticks
from invariants.schedule.survey import Survey
from invariants.schedule.table import NEXT, B, F, Schedule, W
from invariants.schedule.waves import Program, Trace, run_in_waves


def run(schedule: Schedule, surveyed: Survey, times: Ticks, hold: bool) -> Trace:
    """Run a schedule; `hold`: a rank computes nothing while its message occupies the link."""
    computations, stages, microbatches = int(surveyed.offsets[-1]), schedule.stages, schedule.microbatches
    kind = times.took.dtype
    end = np.zeros(computations + 1, kind)
    trace = Trace(
        places=np.empty(computations, np.int32),
        start=np.zeros(computations + 1, kind),
        end=end,
        arrives=np.zeros(computations + 1, kind) if times.links else end,
        made=np.full((2, stages + 1, microbatches), -1, np.int32),
        busy=np.zeros(schedule.ranks, kind),
        stopped=schedule.starts[:-1].copy(),
    )
    trace.made[0, 0] = computations
    trace.made[1, stages] = computations
    # Rows of `made`, counted from that of the stage itself: F, I, W, B.
    gradient = stages + 1
    rows = np.array([[0, gradient + 1, gradient, gradient + 1], [0, 1, gradient, 1], [1, gradient, 0, gradient]])
    columns = schedule.starts, schedule.op, schedule.stage, schedule.microbatch, schedule.joint
    prices = times.took, times.pair, times.link, times.transfer, times.latency
    program = Program(*columns, *surveyed[:2], rows * microbatches, *prices, len(times.links), hold)
    if available():
        _run_compiled(program, trace)
    else:
        run_in_waves(program, trace)
    return trace


@loop
def _run_compiled(p: Program, t: Trace) -> None:
    ranks, stages, microbatches = len(t.busy), len(p.home), t.made.shape[2]
    needs, owns, makes, made = p.cells[0], p.cells[1], p.cells[2], t.made.ravel()
    free, queue = np.zeros_like(t.busy), np.zeros(p.links, t.busy.dtype)
    put, waits = p.offsets[:-1].copy(), np.full(ranks, -1)
    todo, left = np.arange(ranks)[::-1].copy(), ranks
    while left:
        left -= 1
        rank = todo[left]
        here, stop, place = t.stopped[rank], p.starts[rank + 1], put[rank]
        while here < stop:
            if p.op[here] > B:
                here += 1
                continue
            ready, cost, last = free[rank], free[rank] * 0, here
            while last < stop and (last == here or (p.joint[last] == NEXT and p.op[last] <= B)):
                op, cell = p.op[last], p.stage[last] * microbatches + p.microbatch[last]
                need = made[cell + needs[op]]
                if need < 0 or made[cell + owns[op]] < 0:
                    waits[rank] = cell + needs[op]
                    break
                ready = max(ready, t.arrives[need])
                cost += p.took[op, p.stage[last]]
                last += 1
            if waits[rank] >= 0:
                break
            if last - here > 1 and p.pair[p.stage[here]] >= 0:
                cost = p.pair[p.stage[here]]
            t.busy[rank] += cost
            free[rank] = done = ready + cost
            for action in range(here, last):
                op, stage = p.op[action], p.stage[action]
                t.places[place], t.start[place], t.end[place], t.arrives[place] = action, ready, done, done
                cell = stage * microbatches + p.microbatch[action] + makes[op]
                if op != W and made[cell] < 0:
                    made[cell] = place
                    kind, to = (0, stage + 1) if op == F else (1, stage - 1)
                    link = p.link[kind, stage]
                    if link >= 0:
                        queue[link] = sent = max(free[rank], queue[link]) + p.transfer[kind, stage]
                        t.arrives[place] = sent + p.latency[kind, stage]
                        free[rank] = sent if p.hold else done
                    if 0 <= to < stages and waits[p.home[to]] == cell:
                        waits[p.home[to]] = -1
                        todo[left] = p.home[to]
                        left += 1
                place += 1
            here = last
        t.stopped[rank], put[rank] = here, place
