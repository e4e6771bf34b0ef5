"""schedule.activations: no stage holds more microbatches than its schedule promises.

It counts microbatches, not bytes; memory that no saved tensor holds is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from invariants.catalog.pipelines import known_family, pipelines
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.activations import in_flight
from invariants.schedule.formulas import in_flight_bound


@invariant("schedule.activations", needs=[Section.SCHEDULE], applies=lambda case: known_family(case.schedule))
def schedule_activations(evidence: Evidence) -> Iterator[Violation]:
    """Microbatches in flight on stage s are at most M for GPipe and min(M, N-s) for 1F1B, in the schedule and, where
    they were recorded, at run time; none between steps.
    """
    case = evidence.case
    stages = case.topology.size("pp")

    def bound(stage: int) -> int:
        return in_flight_bound(case.schedule, stage, stages, case.microbatches)

    for ranks, schedule in pipelines(evidence):
        for stage, peak in sorted(in_flight(schedule).items()):
            if peak > bound(stage):
                what = "microbatches in flight in the schedule"
                limit = f"at most {bound(stage)}"
                yield Violation(what, limit, str(peak), rank=ranks[stage], stage=stage, excess=peak / bound(stage))
    for seen in evidence.activations or ():
        place = partial(Violation, rank=seen.rank, stage=seen.stage, step=seen.step)
        if seen.peak > bound(seen.stage):
            limit = f"at most {bound(seen.stage)}"
            excess = seen.peak / bound(seen.stage)
            yield place("microbatches held at run time", limit, str(seen.peak), excess=excess)
        if seen.left:
            yield place("microbatches held after the step", "0", str(seen.left), excess=seen.left)
