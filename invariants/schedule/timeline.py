"""When each computation runs, how long each rank is idle, and what the whole is bound by: exact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from invariants.errors import InvariantsError
from invariants.schedule.actions import Action, Row
from invariants.schedule.computations import Computations, computations
from invariants.schedule.costs import Costs, Ticks, ticks
from invariants.schedule.critical import critical_path
from invariants.schedule.simulation import run
from invariants.schedule.table import OPS, B, F, I, Schedule, W, as_schedule
from invariants.schedule.waves import Trace, cells


class NeverEnds(InvariantsError):
    """A schedule in which some computation waits for a result that never comes."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """One run of a schedule, from time 0.

    Of the C computations, rank after rank in program order: `index` [C] (int32) in the schedule, `start` and `end` [C]
    in ticks: int64 counts of `unit`, which is a fraction of the costs' unit; float64 where these would not fit
    (`exact` is False). Rank r's are those from `offsets[r]` up to `offsets[r+1]` [R+1]. The parts of a compound cell
    start and end together. Times as `Fraction` have the unit of the costs.
    """

    schedule: Schedule
    costs: Costs
    ticks: Ticks = field(repr=False)
    work: Computations = field(repr=False)
    trace: Trace = field(repr=False)

    @cached_property
    def index(self) -> NDArray[np.int32]:
        """Place of each computation in the schedule [C]."""
        return _places(self.schedule)

    @cached_property
    def start(self) -> NDArray[Any]:
        """Tick at which each computation starts [C]."""
        return self._starts(slice(None))

    def start_of(self, rank: int) -> NDArray[Any]:
        """Tick at which each computation of one rank starts, without those of all the others."""
        return self._starts(slice(self.offsets[rank], self.offsets[rank + 1]))

    def _starts(self, which: slice) -> NDArray[Any]:
        lead, cost = cells(self.work.code[which], self.work.bits, self.ticks.took, self.ticks.pair)
        start: NDArray[Any] = self.end[which] - np.repeat(cost, np.diff(lead))
        return start

    @property
    def end(self) -> NDArray[Any]:
        """Tick at which each computation is done [C]."""
        return self.trace.end[:-1]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """First computation of each rank, and the end [R+1]."""
        return self.work.offsets

    @property
    def unit(self) -> Fraction:
        """One tick in the unit of the costs."""
        return self.ticks.unit

    @property
    def exact(self) -> bool:
        """Whether times are whole ticks; if not they are rounded to double precision."""
        return self.ticks.exact

    def time(self, ticks: int | float | np.number[Any]) -> Fraction:
        """A number of ticks in the unit of the costs."""
        return Fraction(int(ticks) if self.exact else float(ticks)) * self.unit

    @cached_property
    def makespan(self) -> Fraction:
        """Time at which the last computation is done."""
        return self.time(self._last.max(initial=0))

    @cached_property
    def busy(self) -> tuple[Fraction, ...]:
        """Time for which each rank computes [R]; a compound cell counts once, and sending does not count."""
        return tuple(map(self.time, self.trace.busy))

    @cached_property
    def idle_share(self) -> tuple[Fraction, ...]:
        """Share of the *makespan* for which each rank does not compute [R]; 0 where the makespan is 0."""
        return tuple(1 - busy / self.makespan if self.makespan else Fraction() for busy in self.busy)

    @cached_property
    def span(self) -> tuple[Fraction, ...]:
        """A rank's own time, from its first start to its last end [R]."""
        return tuple(map(self.time, self._last - self.trace.begin))

    @cached_property
    def own_idle(self) -> tuple[Fraction, ...]:
        """A rank's own span less its work [R].

        The convention of the zero-bubble papers, arXiv:2401.10241, which count from a stage's first start to its last
        end: where neighbouring iterations overlap, the wait before and the wait after are not lost.
        """
        return tuple(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    def critical_path(self) -> tuple[str, ...]:
        """What the makespan is bound by, in words: "36 of 40 time units compute on stage 3", "4 wait on link 2->3"."""
        return critical_path(self).sentences()

    @cached_property
    def _last(self) -> NDArray[Any]:
        """Last end of each rank [R], 0 where it computes nothing."""
        return np.where(np.diff(self.offsets) > 0, self.trace.end[self.offsets[1:] - 1], 0)


def simulate(schedule: Schedule | Iterable[Row], costs: Costs | None = None) -> Timeline:
    """Run each rank's computations in order, each as soon as the results that it needs exist; default costs are 1.

    The forward of a stage needs that of the stage before; its backward B, or its input gradient I, needs its own
    forward and the B or I of the stage after; its weight gradient W needs its own I. A compound cell of computations
    starts when the data of all its parts exist, and its parts end together. What a rank sends goes out in the order in
    which it was made, and costs what `costs` says; stages of one rank exchange nothing. Sends and receives in the rows
    order nothing: data decides. Empty cells, UNSHARD, RESHARD and REDUCE_GRAD take no time. Of an action that occurs
    twice both take time, and the first one's result is used.

    Raises `NeverEnds` where a result never comes, and `UsageError` for costs that do not fit the schedule, for a stage
    that computes on two ranks, and for a computation without stage or microbatch.
    """
    schedule, costs = as_schedule(schedule), costs or Costs()
    work = computations(schedule)
    times = ticks(costs, work)
    trace = run(work, times, hold=not costs.overlap)
    if (trace.stopped < work.offsets[1:]).any():
        raise NeverEnds(_explain(schedule, work, trace))
    return Timeline(schedule, costs, times, work, trace)


def _places(schedule: Schedule) -> NDArray[np.int32]:
    return np.flatnonzero(schedule.computes).astype(np.int32)


def _explain(schedule: Schedule, work: Computations, trace: Trace) -> str:
    stuck = np.flatnonzero(trace.stopped < work.offsets[1:])
    rank, more = int(stuck[0]), f"; {len(stuck) - 1} more wait" if len(stuck) > 1 else ""
    for index in _places(schedule)[trace.stopped[rank] : work.offsets[rank + 1]]:
        missing = _missing(schedule, trace.made, int(index))
        if missing:
            return f"schedule never ends: rank {rank} waits at {schedule.action(int(index))} for {missing}{more}"
    raise AssertionError(f"rank {rank} has stopped, but lacks nothing")


def _missing(schedule: Schedule, made: NDArray[np.int32], index: int) -> Action | None:
    """The result that a computation of a cell lacks; None where it lacks none."""
    op, stage, microbatch = schedule.op[index], int(schedule.stage[index]), int(schedule.microbatch[index])
    if op in (I, B) and made[0, stage + 1, microbatch] < 0:
        return Action(stage, OPS[F], microbatch)
    if op == F:
        return Action(stage - 1, OPS[F], microbatch) if made[0, stage, microbatch] < 0 else None
    maker = stage if op == W else stage + 1
    if made[1, maker, microbatch] >= 0:
        return None
    planned = schedule.op[(schedule.stage == maker) & (schedule.microbatch == microbatch)]
    return Action(maker, OPS[I if I in planned or (op != B and B not in planned) else B], microbatch)
