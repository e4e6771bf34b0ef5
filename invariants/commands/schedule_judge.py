"""Everything that is decided about one schedule, as data to print, draw and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, NamedTuple

import numpy as np

from invariants.commands.schedule_sources import Source
from invariants.errors import UsageError
from invariants.report.schedule_chart import picked
from invariants.schedule import formulas
from invariants.schedule.activations import Peaks, peaks
from invariants.schedule.completeness import misordered, missing
from invariants.schedule.costs import Costs
from invariants.schedule.inventory import Inventory
from invariants.schedule.lowering import lower
from invariants.schedule.minimal import smallest
from invariants.schedule.order import Outcome, evaluate
from invariants.schedule.table import Schedule
from invariants.schedule.text import format_csv
from invariants.schedule.timeline import NeverEnds, Timeline, simulate

Verdict = Literal["holds", "violated", "unknown", "not applicable"]
HOLDS: Final = "holds"
VIOLATED: Final = "violated"
UNKNOWN: Final = "unknown"
NOT_APPLICABLE: Final = "not applicable"
NO_FAMILY: Final = "a file has no formula of its own: --family names one to compare with"
LAST: Final = 16
"""Ranks of which the last cell is told; of more, each k-th and the last."""
SMALL: Final = 200
"""Actions of a smallest part up to which it is printed."""
_ROUNDING: Final = Fraction(1, 10**9)
"""Share of the makespan by which times that are no whole ticks may differ from a closed form."""


@dataclass(frozen=True)
class Line:
    """One verdict: `detail` says in one line what was found.

    Where something is wrong `problems` say all of it, a line each, and `notes` what else helps to understand it.
    """

    check: str
    verdict: Verdict
    detail: str
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()


class Measured(NamedTuple):
    """When a schedule does what, and what its ranks hold at most."""

    timeline: Timeline
    peaks: Peaks


@dataclass(frozen=True)
class Judged:
    """One schedule with its verdicts; `measured` is None where it never ends.

    One of its stages holds `weight` of the layers that the costs are meant for. `lowering` is how sends and receives
    were added, None where the schedule has its own.
    """

    source: Source
    lines: Sequence[Line]
    measured: Measured | None
    weight: Fraction
    lowering: str | None


def judge(source: Source, transports: Sequence[str], lowering: str, costs: Costs, weight: Fraction) -> Judged:
    """Decide everything about one schedule.

    Sends and receives are those of the schedule, or, where it has none, those that `lowering` adds. Costs that do not
    fit are a `UsageError`.
    """
    how = None if source.schedule.communicates else lowering
    lines = [*_contents(source)]
    try:
        _ = source.schedule.placement
    except UsageError as error:
        return Judged(source, [*lines, Line("deadlock-free", UNKNOWN, str(error))], None, weight, how)
    most = peaks(source.schedule, costs)
    lines += _deadlocks(source, transports, how)
    measured = None
    try:
        measured = Measured(simulate(source.schedule, costs), most)
        lines.append(_bubble(source, measured.timeline))
    except NeverEnds as error:
        lines.append(Line("timeline", VIOLATED, "it never ends", [str(error)]))
    lines.append(_activations(source, most.rank.tolist()))
    return Judged(source, lines, measured, weight, how)


def _contents(source: Source) -> Iterator[Line]:
    found = Inventory.of(source.schedule, source.stages, source.microbatches)
    for check, problems, promise in (
        ("complete", missing(found), "each forward, input gradient and weight gradient exactly once"),
        ("ordered", misordered(found), "on each rank, nothing is used before it is made or received"),
    ):
        yield Line(check, VIOLATED, problems[0], problems) if problems else Line(check, HOLDS, promise)


def _deadlocks(source: Source, transports: Sequence[str], how: str | None) -> Iterator[Line]:
    """A line for each transport, and one for all of them where there are several."""
    try:
        lowered = lower(source.schedule, how) if how else source.schedule
    except UsageError as error:
        yield Line("deadlock-free", UNKNOWN, f"sends and receives cannot be added: {error}")
        return
    failed = []
    for transport in transports:
        line = _deadlock(lowered, transport)
        failed += [transport] if line.verdict == VIOLATED else []
        yield line
    if len(transports) > 1:
        detail = f"not under {', '.join(failed)}" if failed else "deadlock-free under each of these transports"
        yield Line("portable", VIOLATED if failed else HOLDS, detail)


def _deadlock(lowered: Schedule, transport: str) -> Line:
    check = f"deadlock-free, {transport}"
    outcome = evaluate(lowered, transport)
    if outcome.finished and not outcome.mismatches:
        return Line(check, HOLDS, "ends, each receive with its own message")
    if outcome.finished:
        return Line(check, VIOLATED, f"ends on wrong data: {outcome.mismatches[0]}", outcome.mismatches)
    return Line(check, VIOLATED, _waits(outcome), outcome.cycle, [*_notes(outcome, lowered, transport)])


def _waits(outcome: Outcome) -> str:
    if len(outcome.cycle) > 2:
        return f"a cycle of {len(outcome.cycle)} waits: {outcome.cycle[0]}; ..."
    return "; ".join(outcome.cycle)


def _notes(outcome: Outcome, lowered: Schedule, transport: str) -> Iterator[str]:
    """The last cell that each rank got done, and the smallest part of the schedule that deadlocks as well."""
    done = (f"rank {rank}: {outcome.last[rank] or 'nothing'}" for rank in picked(lowered.ranks, LAST))
    yield f"last done  {', '.join(done)}"
    small = smallest(lowered, transport)
    microbatches = len(np.unique(small.microbatch[small.microbatch >= 0]))
    plural = "" if microbatches == 1 else "es"
    yield f"smallest   {small.ranks} ranks and {microbatches} microbatch{plural} of it deadlock as well"
    if len(small) <= SMALL:
        yield from (f"           {row}" for row in format_csv(small).splitlines())


def _bubble(source: Source, timeline: Timeline) -> Line:
    """The simulated time against the closed form of the family, in both conventions."""
    family, ranks, microbatches = source.family, source.schedule.ranks, source.microbatches
    if family is None:
        return Line("bubble", NOT_APPLICABLE, NO_FAMILY)
    try:
        reason = formulas.outside(family, ranks, microbatches, source.virtual, timeline.costs)
    except UsageError as error:
        return Line("bubble", NOT_APPLICABLE, str(error))
    if reason:
        return Line("bubble", NOT_APPLICABLE, reason)
    sizes = family, ranks, microbatches, source.virtual, timeline.costs
    problems = []
    rounding = Fraction() if timeline.exact else _ROUNDING
    for name, seen, expected, scale in (
        ("makespan", timeline.makespan, formulas.makespan(*sizes), timeline.makespan),
        ("idle share of rank 0", timeline.idle_share[0], formulas.idle_share(*sizes), 1),
        ("greatest own span less work", max(timeline.own_idle), formulas.own_idle(*sizes), timeline.makespan),
    ):
        if abs(seen - expected) > rounding * scale:
            problems.append(f"{name} is {_short(seen)}: expected {_short(expected)}, the closed form of {family}")
    if problems:
        return Line("bubble", VIOLATED, problems[0], problems)
    idle, own = _short(formulas.idle_share(*sizes)), _short(formulas.own_idle(*sizes))
    return Line("bubble", HOLDS, f"as the closed form: idle {idle} of the makespan, own span less work at most {own}")


def _short(value: Fraction) -> str:
    """A number: as a fraction, or with six digits where nobody could read that."""
    return str(value) if len(str(value)) <= 2 * 15 else f"{float(value):.6g}"


def _activations(source: Source, held: Sequence[int]) -> Line:
    """The most microbatches that each rank holds against the bound of the family."""
    family, ranks = source.family, source.schedule.ranks
    if family is None:
        return Line("activations", NOT_APPLICABLE, f"at most {max(held)} in flight on a rank; {NO_FAMILY}")
    try:
        bounds = [
            formulas.rank_in_flight_bound(family, rank, ranks, source.microbatches, source.virtual)
            for rank in range(ranks)
        ]
    except UsageError as error:
        return Line("activations", NOT_APPLICABLE, str(error))
    problems = [
        f"rank {rank} holds {peak}: expected at most {bound}, the bound of {family}"
        for rank, (peak, bound) in enumerate(zip(held, bounds, strict=True))
        if peak > bound
    ]
    if problems:
        return Line("activations", VIOLATED, problems[0], problems)
    return Line("activations", HOLDS, f"at most {max(held)} in flight on a rank: the bound is {max(bounds)}")
