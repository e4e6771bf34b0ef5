"""What a timeline is bound by: a chain of computations and messages that wait for each other, from start to end.

It is walked back from the end, in one step for each cell on the chain.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.costs import FROM_FORWARD, FROM_GRADIENT
from invariants.schedule.table import F, W

if TYPE_CHECKING:
    from invariants.schedule.timeline import Timeline

_NAMED: Final = 3
"""So many stages or links are named; a pipeline of a thousand ranks passes through all of them once."""
_ROUNDING: Final = 1e-9
_READABLE: Final = 10**15
"""Whole numbers below it are written out."""


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """A chain that takes the whole makespan; where several do, one that stays on its rank as long as it can.

    `steps` [K] (int64): its cells in order of time, each by its first computation, as the timeline counts them.
    `compute`: time by stage, that of a compound cell under all its stages. `wait`: time by link, an ordered pair of
    ranks, in which the chain waits for latency or bandwidth. Together they are the makespan, in the unit of the costs.
    """

    steps: NDArray[np.int64]
    compute: dict[tuple[int, ...], Fraction]
    wait: dict[tuple[int, int], Fraction]

    def sentences(self) -> tuple[str, ...]:
        """The stages and links that take most, the largest first, then what the others take together."""
        whole = sum([*self.compute.values(), *self.wait.values()], Fraction())
        causes = [(time, "compute on", "stage", on) for on, time in sorted(self.compute.items())]
        causes += [(time, "wait on", "link", on) for on, time in sorted(self.wait.items())]
        causes = sorted((cause for cause in causes if cause[0] > 0), key=lambda cause: -cause[0])
        said = [(time, f"{verb} {_name(kind, on)}") for time, verb, kind, on in causes[:_NAMED]]
        for verb, kind in (("compute on", "stage"), ("wait on", "link")):
            rest = [cause[0] for cause in causes[_NAMED:] if cause[2] == kind]
            if rest:
                said.append((sum(rest, Fraction()), f"{verb} {len(rest)} other {kind}{'s' if len(rest) > 1 else ''}"))
        if not said:
            return ("nothing takes time",)
        (time, first), *others = said
        return (
            f"{_number(time)} of {_number(whole)} time units {first}",
            *(f"{_number(time)} {text}" for time, text in others),
        )


def critical_path(timeline: Timeline) -> CriticalPath:
    """Walk a timeline back from its end; every time that is passed is a computation's, or a wait for a message."""
    return _Walk(timeline).path()


class _Walk:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.work, self.trace, self.ticks = timeline, timeline.work, timeline.trace, timeline.ticks
        self.compute: defaultdict[tuple[int, ...], Any] = defaultdict(int)
        self.wait: defaultdict[tuple[int, int], Any] = defaultdict(int)
        self.slack = 0 if timeline.exact else _ROUNDING * float(timeline.makespan)

    def path(self) -> CriticalPath:
        """The whole chain."""
        steps: list[int] = []
        place: int | None = int(self.timeline.end.argmax()) if len(self.work.code) else None
        while place is not None:
            cell = self.cell(place)
            steps.append(cell.start)
            stages = tuple(sorted({self.message(part)[1] for part in cell}))
            self.compute[stages] += self.cost(cell)
            place = self.before(cell)
        time = self.timeline.time
        return CriticalPath(
            np.array(steps[::-1], np.int64),
            {stages: time(ticks) for stages, ticks in self.compute.items()},
            {link: time(ticks) for link, ticks in self.wait.items()},
        )

    def cell(self, place: int) -> range:
        """The computations of the cell that `place` belongs to."""
        code, first, last = self.work.code, place, place + 1
        while not code[first] & 4:
            first -= 1
        while last < len(code) and not code[last] & 4:
            last += 1
        return range(first, last)

    def cost(self, cell: range) -> Any:
        """Time that a cell takes."""
        overlapped = self.ticks.pair[self.message(cell.start)[1]].item()
        if len(cell) > 1 and overlapped >= 0:
            return overlapped
        return sum(self.ticks.took[self.work.code[part] & 3, self.message(part)[1]].item() for part in cell)

    def message(self, place: int) -> tuple[int, int, int]:
        """What a computation makes: its kind, stage and microbatch."""
        code = int(self.work.code[place])
        cell = code >> 3
        kind = FROM_FORWARD if code & 3 == F else FROM_GRADIENT
        return kind, cell >> self.work.bits, cell & ((1 << self.work.bits) - 1)

    def before(self, cell: range) -> int | None:
        """What the cell's start was waiting for; None where it starts with the schedule."""
        end = self.trace.end
        start = end[cell.start] - self.cost(cell)
        if start <= self.slack:
            return None
        rank = int(np.searchsorted(self.work.offsets, cell.start, side="right")) - 1
        previous = cell.start - 1 if cell.start > self.work.offsets[rank] else None
        if previous is not None and start - end[previous] <= self.slack:
            return previous
        for part in cell:
            kind, stage, microbatch = self.message(part)
            row = stage if kind == FROM_FORWARD else stage + 1
            maker = int(self.trace.made[kind, row, microbatch])
            if self.work.code[part] & 3 != W and start - self.trace.arrives[maker] <= self.slack:
                sender = self.head(maker)
                if self.sends(maker):
                    self.wait[self.link(maker)] += (start - end[sender]).item()
                return sender
        assert previous is not None, "what starts late has waited for something"
        for part in self.cell(previous):
            if self.sends(part):
                self.wait[self.link(part)] += self.price(self.ticks.transfer, part)
        return previous

    def head(self, maker: int) -> int:
        """The computation after which the link was busy without a break until the message of `maker` was sent."""
        if not self.timeline.costs.overlap or not self.sends(maker):
            return maker
        while True:
            cost = self.price(self.ticks.transfer, maker) + self.price(self.ticks.latency, maker)
            if self.trace.arrives[maker] - cost - self.trace.end[maker] <= self.slack:
                return maker
            link = self.link(maker)
            maker -= 1
            while not self.sends(maker) or self.link(maker) != link:
                maker -= 1

    def sends(self, place: int) -> bool:
        """Whether a computation's result is sent to another rank, at a cost."""
        kind, stage, microbatch = self.message(place)
        row = stage + 1 if kind == FROM_FORWARD else stage
        first = self.trace.made[kind, row, microbatch] == place
        return bool(first and self.ticks.link[kind, stage] >= 0)

    def link(self, place: int) -> tuple[int, int]:
        """The link on which a computation's result is sent."""
        kind, stage, _ = self.message(place)
        return self.ticks.links[self.ticks.link[kind, stage]]

    def price(self, prices: NDArray[Any], place: int) -> Any:
        """Price of the message that a computation makes, from those of all messages [2, S]."""
        kind, stage, _ = self.message(place)
        return prices[kind, stage].item()


def _name(kind: str, on: tuple[int, ...]) -> str:
    if kind == "link":
        return f"link {on[0]}->{on[1]}"
    return f"stage {on[0]}" if len(on) == 1 else f"stages {' and '.join(map(str, on))}"


def _number(time: Fraction) -> str:
    return str(time) if time.denominator == 1 and time < _READABLE else f"{float(time):.6g}"
