"""schedule.deadlock-free: a schedule ends under every kind of send, in the order in which the target posts it.

The order is judged, not a run: on gloo a rank goes on after `isend`, so runs hide what blocking sends make.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.pipelines import pipelines
from invariants.errors import UsageError
from invariants.evidence import Evidence, Section
from invariants.invariant import NotApplicable, Violation, invariant
from invariants.schedule.lowering import lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import Schedule


@invariant("schedule.deadlock-free", needs=[Section.SCHEDULE])
def schedule_deadlock_free(evidence: Evidence) -> Iterator[Violation]:
    """The schedule ends with buffered and with blocking (rendezvous) sends, in the target's own lowered order, or in
    the lowering that the target declares for computation alone; each receive gets the message that it waits for.
    """
    for ranks, schedule in pipelines(evidence):
        lowered = _lowered(evidence, _placed(schedule))
        for transport in ("buffered", "blocking"):
            outcome = evaluate(lowered, transport)
            if not outcome.finished:
                yield Violation(f"{transport} sends", "termination", "; ".join(outcome.cycle), rank=ranks[0])
            for mismatch in outcome.mismatches:
                yield Violation(f"{transport} sends", "each receive gets its message", str(mismatch), rank=ranks[0])


def _placed(schedule: Schedule) -> Schedule:
    """The schedule, where each stage computes on one rank: else nobody can say who sends to whom."""
    try:
        _ = schedule.placement
    except UsageError as error:
        raise NotApplicable(f"{error}; see schedule.complete") from None
    return schedule


def _lowered(evidence: Evidence, schedule: Schedule) -> Schedule:
    if schedule.ranks == 1 or schedule.communicates:
        return schedule
    if evidence.promises.lowering is None:
        raise NotApplicable("the schedule lists computation only, and the target declares no lowering")
    return lower(schedule, evidence.promises.lowering)
