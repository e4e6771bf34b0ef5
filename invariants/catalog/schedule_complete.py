"""schedule.complete: a schedule does everything once.

It counts what is listed; whether that ends, `schedule.deadlock-free` decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.pipelines import first_trained_stage, least_stages, pipelines
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.completeness import missing
from invariants.schedule.inventory import Inventory


@invariant("schedule.complete", needs=[Section.SCHEDULE])
def schedule_complete(evidence: Evidence) -> Iterator[Violation]:
    """Each microbatch is computed once, forward and backward, on each stage, and each stage on one rank. Nothing is out
    of range. Where the schedule communicates, each send has its receive, and whatever crosses ranks is exchanged.
    """
    trained = first_trained_stage(evidence)
    for ranks, schedule in pipelines(evidence):
        stages = least_stages(evidence.case.schedule, schedule)
        inventory = Inventory.of(schedule, stages, evidence.case.microbatches)
        for problem in missing(inventory, trained):
            yield Violation(problem, "a complete schedule", "an incomplete one", rank=ranks[0])
