"""What ranks and stages hold for backwards that are still to come, in microbatches and in bytes.

A microbatch is in flight on a stage from the start of its forward to the end of its full backward, or of its weight
gradient where the backward is split, since that still needs the layers' inputs. A rank with several stages holds the
sum over them: a microbatch that is in flight on two of its stages counts twice. What a compound cell opens is held
before what it closes is let go. A forward that is repeated opens nothing, and a microbatch that is never closed stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy import uint32
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.actions import Row
from invariants.schedule.compiled import available, loop
from invariants.schedule.computations import Computations, computations
from invariants.schedule.costs import Costs
from invariants.schedule.table import F, I, Schedule, as_schedule
from invariants.schedule.timeline import Timeline


class Peaks(NamedTuple):
    """The most that is in flight at once (int64).

    In microbatches, of each stage [S] and of each rank [R]; in bytes the same, None where a microbatch's are not known.
    A rank's stages need not peak together, so its peak may be less than the sum of theirs.
    """

    stage: NDArray[np.int64]
    rank: NDArray[np.int64]
    stage_bytes: NDArray[np.int64] | None
    rank_bytes: NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class Curve:
    """What is in flight over time, as steps: from `times[k]` until `times[k+1]` it is `microbatches[k]`.

    Times are ticks of the timeline, rising or equal; levels [K] are int64; `bytes` is None where they are not known.
    """

    times: NDArray[Any]
    microbatches: NDArray[np.int64]
    bytes: NDArray[np.int64] | None


def peaks(schedule: Schedule | Iterable[Row], costs: Costs | None = None) -> Peaks:
    """The most that each stage and each rank holds at once, in program order; `costs` for the bytes.

    A rank's events in time are in its program order, so no cost model changes its peak.
    """
    schedule = as_schedule(schedule)
    work = computations(schedule)
    size = (costs or Costs()).bytes_of(schedule.stages)
    sizes = np.zeros(schedule.stages, np.int64) if size is None else size
    stage, rank = np.zeros(schedule.stages, np.int64), np.zeros((2, schedule.ranks), np.int64)
    if available():
        held = np.zeros(schedule.stages << work.bits, np.uint8)
        _peaks_compiled(work.code.view(f"u{work.code.itemsize}"), work.bits, work.offsets, sizes, held, stage, rank)
    else:
        _peaks_numpy(work, sizes, stage, rank)
    return Peaks(stage, rank[0], None if size is None else stage * size, None if size is None else rank[1])


def in_flight(schedule: Schedule | Iterable[Row]) -> dict[int, int]:
    """Peak number of microbatches in flight on each stage that has a forward, by stage, in microbatches."""
    schedule = as_schedule(schedule)
    most = peaks(schedule).stage
    return {int(stage): int(most[stage]) for stage in np.flatnonzero(most)}


def curve(timeline: Timeline, rank: int, stage: int | None = None) -> Curve:
    """What `rank` holds over time, for one of its stages or for all of them; it begins with nothing, at time 0."""
    if not 0 <= rank < timeline.schedule.ranks:
        raise UsageError(f"activations: rank={rank}: expected 0 to {timeline.schedule.ranks - 1}")
    place, where, change = _changes(timeline.work, rank)
    if stage is not None:
        mine = where == stage
        place, where, change = place[mine], where[mine], change[mine]
    times = np.where(change > 0, timeline.start_of(rank)[place - timeline.offsets[rank]], timeline.end[place])
    sizes = timeline.costs.bytes_of(timeline.schedule.stages)
    return Curve(
        np.append(np.zeros(1, times.dtype), times),
        np.append(0, np.cumsum(change)),
        None if sizes is None else np.append(0, np.cumsum(change * sizes[where])),
    )


@loop
def _peaks_compiled(
    code: NDArray[Any],
    bits: int,
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    held: NDArray[np.uint8],
    stage_most: NDArray[np.int64],
    rank_most: NDArray[np.int64],
) -> None:
    level, closed = np.zeros_like(stage_most), uint32(0)
    for rank in range(len(offsets) - 1):
        total, weight, most, heaviest = 0, 0, 0, 0
        stop = uint32(offsets[rank + 1])
        for here in range(uint32(offsets[rank]), stop + 1):
            if here == stop or code[here] & 4:  # the cell before is over
                while closed < here:
                    op, cell = code[closed] & 3, code[closed] >> 3
                    if op != F and op != I and held[cell]:
                        held[cell] = 0
                        stage = cell >> bits
                        level[stage] -= 1
                        total -= 1
                        weight -= sizes[stage]
                    closed = uint32(closed + 1)
            if here < stop:
                op, cell = code[here] & 3, code[here] >> 3
                if op == F and not held[cell]:
                    held[cell] = 1
                    stage = cell >> bits
                    level[stage] += 1
                    total += 1
                    weight += sizes[stage]
                    stage_most[stage] = max(stage_most[stage], level[stage])
                    most, heaviest = max(most, total), max(heaviest, weight)
        rank_most[0, rank], rank_most[1, rank] = most, heaviest


def _peaks_numpy(
    work: Computations, sizes: NDArray[np.int64], stage_most: NDArray[np.int64], rank_most: NDArray[np.int64]
) -> None:
    for rank in range(len(work.offsets) - 1):
        _, stage, change = _changes(work, rank)
        rank_most[0, rank] = np.cumsum(change).max(initial=0)
        rank_most[1, rank] = np.cumsum(change * sizes[stage]).max(initial=0)
        if len(change):
            order = np.argsort(stage, kind="stable")
            stage, change = stage[order], change[order]
            level = np.cumsum(change)
            first = np.flatnonzero(np.diff(stage, prepend=-1))
            stage_most[stage[first]] = np.maximum.reduceat(level, first) - level[first] + change[first]


def _changes(work: Computations, rank: int) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
    """What opens (+1) and closes (-1) on a rank, in order: which computation, on which stage, and which of both."""
    place = np.arange(work.offsets[rank], work.offsets[rank + 1])
    code = work.code[place]
    closes = (code & 3) != F
    if not (code & 4).all():
        order = np.argsort(2 * np.cumsum((code & 4) != 0) + closes, kind="stable")
        place, code, closes = place[order], code[order], closes[order]
    event = np.flatnonzero((code & 3) != I)
    place, cell, closes = place[event], code[event] >> 3, closes[event]
    order = np.argsort(cell, kind="stable")
    ordered = closes[order]
    # As if each microbatch had been closed before its first event, so that a close without a forward does nothing.
    before = np.append(True, ordered[:-1]) | (np.diff(cell[order], prepend=-1) != 0)
    counts = np.empty(len(cell), np.bool_)
    counts[order] = before != ordered
    return place[counts], cell[counts] >> work.bits, np.where(closes[counts], -1, 1)
