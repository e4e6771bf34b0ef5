"""What is drawn of one schedule: its computations in time as arrays, whatever draws them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.activations import curve
from invariants.schedule.table import ALONE, OPS, B, F, I, W

if TYPE_CHECKING:
    from invariants.schedule.timeline import Timeline

Floats = NDArray[np.float64]
KINDS: Final = (F, I, W, B)
"""Operation codes that are drawn, in the order of a legend."""
LETTERS: Final = {kind: OPS[kind].value for kind in KINDS}
Window = tuple[float, float]
"""Begin and end of the part of time that is drawn, in the unit of the costs."""
MEANING: Final = {F: "forward", I: "input gradient", W: "weight gradient", B: "full backward"}


@dataclass(frozen=True)
class Chart:
    """One run of a schedule: all of its computations [C], rank after rank, each rank's in program order.

    `name` is short, `title` says more. `rank`, `op` (codes of `table.OPS`), `stage` and `microbatch`; `chunk`, which of
    its rank's stages it is, counted from 0; `joint`, whether it overlaps with another one; `start` and `end` in the
    unit of the costs. `weight` is what a microbatch in flight on one stage counts.
    """

    name: str
    title: str
    ranks: int
    makespan: float
    rank: NDArray[np.int32]
    op: NDArray[np.uint8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int32]
    joint: NDArray[np.bool_]
    start: Floats
    end: Floats
    timeline: Timeline
    weight: float = 1.0

    @classmethod
    def of(cls, name: str, title: str, timeline: Timeline, weight: float = 1.0) -> Chart:
        """The chart of a timeline."""
        schedule, at, unit = timeline.schedule, timeline.index, float(timeline.unit)
        rank, stage = schedule.rank[at], schedule.stage[at]
        return cls(
            name,
            title,
            schedule.ranks,
            float(timeline.makespan),
            rank,
            schedule.op[at],
            stage,
            schedule.microbatch[at],
            _chunks(schedule.ranks, rank, stage),
            schedule.joint[at] != ALONE,
            timeline.start * unit,
            timeline.end * unit,
            timeline,
            weight,
        )

    def of_rank(self, rank: int) -> slice:
        """Where a rank's computations are."""
        first, last = np.searchsorted(self.rank, [rank, rank + 1])
        return slice(int(first), int(last))

    @property
    def holds(self) -> str:
        """What `held` counts."""
        return "microbatches" if self.timeline.costs.activation_bytes is None else "bytes"

    def within(self, window: Window) -> NDArray[np.intp]:
        """Which computations take time within the window."""
        return np.flatnonzero((self.end > window[0]) & (self.start < window[1]) & (self.end > self.start))

    def shortest(self, some: NDArray[np.intp]) -> float:
        """Least time of some computations; infinite of none."""
        return float((self.end - self.start)[some].min(initial=np.inf))

    @cached_property
    def chunks(self) -> int:
        """Most stages that a rank computes."""
        return int(self.chunk.max(initial=-1)) + 1

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Those of `KINDS` that occur."""
        return tuple(kind for kind in KINDS if (self.op == kind).any())

    def held(self, rank: int) -> tuple[Floats, Floats]:
        """Times at which what a rank holds changes, and what it holds from then on; from nothing, at time 0.

        In bytes where the costs tell what a microbatch holds, else in microbatches, one on one stage counting `weight`.
        """
        steps = curve(self.timeline, rank)
        last = np.append(np.diff(steps.times) > 0, True)  # of what changes at one time
        held = steps.microbatches * self.weight if steps.bytes is None else steps.bytes
        return steps.times[last] * float(self.timeline.unit), held[last].astype(np.float64)

    def coverage(self, edges: Floats) -> Iterator[NDArray[np.float64]]:
        """For each rank, which share of each column of time each kind fills [4, columns], in the order of `KINDS`.

        `edges` [columns + 1] are the times between the columns, rising. Two computations that overlap fill both their
        share, so a column may be filled more than once.
        """
        width = np.diff(edges)
        for rank in range(self.ranks):
            where = self.of_rank(rank)
            op, start, end = self.op[where], self.start[where], self.end[where]
            yield np.stack([_filled(start[op == kind], end[op == kind], edges) for kind in KINDS]) / width


def _filled(start: Floats, end: Floats, edges: Floats) -> Floats:
    """Time within each column that the spans from `start` to `end`, in order of time, fill."""
    if not len(start):
        return np.zeros(len(edges) - 1)
    knots = np.stack([start, end], axis=1).ravel()
    busy = np.cumsum(end - start)
    filled = np.stack([busy - (end - start), busy], axis=1).ravel()
    return np.diff(np.interp(edges, knots, filled))


def _chunks(ranks: int, rank: NDArray[Any], stage: NDArray[Any]) -> NDArray[np.int32]:
    """Place of each computation's stage among the stages that its rank computes, in rising order."""
    stages = int(stage.max(initial=-1)) + 1
    present = np.unique(rank.astype(np.int64) * stages + stage)
    first = np.searchsorted(present, np.arange(ranks) * stages)
    place = np.searchsorted(present, rank.astype(np.int64) * stages + stage)
    chunk: NDArray[np.int32] = (place - first[rank]).astype(np.int32)
    return chunk


def picked(ranks: int, most: int) -> list[int]:
    """All ranks where there are no more than `most`; else each k-th, as many as that allows, and the last."""
    step = -(-ranks // most)
    return [*range(0, ranks - 1, step), ranks - 1]
