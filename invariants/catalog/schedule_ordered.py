"""schedule.ordered: a schedule uses nothing before it exists.

It judges each rank's own order; the order between ranks is left to `schedule.deadlock-free`.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.pipelines import first_trained_stage, pipelines
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.completeness import misordered
from invariants.schedule.inventory import Inventory


@invariant("schedule.ordered", needs=[Section.SCHEDULE])
def schedule_ordered(evidence: Evidence) -> Iterator[Violation]:
    """On each rank a backward comes after its forward, a weight gradient after its input gradient, a computation after
    what it needs of its rank and after the receive of what it needs of another, and a send after what made its message.
    """
    trained = first_trained_stage(evidence)
    for ranks, schedule in pipelines(evidence):
        inventory = Inventory.of(schedule, max(schedule.stages, schedule.ranks), evidence.case.microbatches)
        for problem in misordered(inventory, trained):
            yield Violation(problem, "each result before its use", "another order", rank=ranks[0])
