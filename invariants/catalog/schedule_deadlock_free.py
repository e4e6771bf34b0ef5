"""schedule.deadlock-free: a schedule ends under every kind of send, in the order in which the target posts it.

The order is judged, not a run: on gloo a rank goes on after `isend`, so runs hide what blocking sends make.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.pipelines import pipelines
from invariants.evidence import Evidence, Section
from invariants.invariant import NotApplicable, Violation, invariant
from invariants.schedule.completeness import complete
from invariants.schedule.lowering import lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import Schedule


@invariant("schedule.deadlock-free", needs=[Section.SCHEDULE])
def schedule_deadlock_free(evidence: Evidence) -> Iterator[Violation]:
    """The schedule is complete and ends with buffered and with blocking (rendezvous) sends, in the target's own lowered
    order, or in the lowering that the target declares for computation alone.
    """
    case = evidence.case
    first_trained = _first_trained_stage(evidence)
    for ranks, schedule in pipelines(evidence):
        problems = complete(schedule, len(ranks), case.microbatches, first_trained)
        for problem in problems:
            yield Violation(problem, "a complete schedule", "an incomplete one", rank=ranks[0])
        if problems:
            continue
        lowered = _lowered(evidence, schedule)
        for transport in ("buffered", "blocking"):
            outcome = evaluate(lowered, transport)
            if not outcome.finished:
                yield Violation(f"{transport} sends", "termination", "; ".join(outcome.cycle), rank=ranks[0])
            for mismatch in outcome.mismatches:
                yield Violation(f"{transport} sends", "each receive gets its message", str(mismatch), rank=ranks[0])


def _lowered(evidence: Evidence, schedule: Schedule) -> Schedule:
    if schedule.ranks == 1 or schedule.communicates:
        return schedule
    if evidence.promises.lowering is None:
        raise NotApplicable("the schedule lists computation only, and the target declares no lowering")
    return lower(schedule, evidence.promises.lowering)


def _first_trained_stage(evidence: Evidence) -> int:
    """Frozen first stages get no gradient. Which ones are, ranks tell; without their word, the case's split does."""
    topology = evidence.case.topology
    held = {(seen.rank, seen.trainable) for seen in evidence.optimizer or () if seen.kind == "parameter"}
    if held:
        trained = {topology.coordinate(rank).get("pp", 0) for rank, trainable in held if trainable}
        return min(trained, default=0)
    split, frozen = evidence.case.split, set(evidence.case.frozen)
    if split is None:
        return 0
    layer = 0
    for stage, count in enumerate(split):
        if not set(range(layer, layer + count)) <= frozen:
            return stage
        layer += count
    return 0
