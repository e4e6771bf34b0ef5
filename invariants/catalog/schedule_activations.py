"""schedule.activations: no stage and no rank holds more microbatches than its schedule promises.

It counts microbatches, not bytes; memory that no saved tensor holds is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from invariants.catalog.pipelines import no_family, pipelines, stages_a_rank
from invariants.errors import UsageError
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.activations import peaks
from invariants.schedule.families import FAMILIES
from invariants.schedule.formulas import in_flight_bound, rank_in_flight_bound
from invariants.schedule.table import Schedule

IN_SCHEDULE: Final = "microbatches in flight in the schedule"


@invariant("schedule.activations", needs=[Section.SCHEDULE], applies=no_family)
def schedule_activations(evidence: Evidence) -> Iterator[Violation]:
    """Each stage, and each rank, holds at most as many microbatches as its family's bound says, in the schedule and,
    where they were recorded, at run time; none between steps.
    """
    virtual = 1
    for ranks, schedule in pipelines(evidence):
        virtual = stages_a_rank(evidence.case.schedule, schedule)
        try:
            yield from _in_schedule(evidence, ranks, schedule, virtual)
        except UsageError as error:
            yield Violation(IN_SCHEDULE, "each stage on one rank", str(error), rank=ranks[0])
    for seen in evidence.activations or ():
        place = partial(Violation, rank=seen.rank, stage=seen.stage, step=seen.step)
        bound = _bound(evidence, seen.stage, virtual)
        if seen.peak > bound:
            excess = _excess(seen.peak, bound)
            yield place("microbatches held at run time", f"at most {bound}", str(seen.peak), excess=excess)
        if seen.left:
            yield place("microbatches held after the step", "0", str(seen.left), excess=seen.left)


def _in_schedule(evidence: Evidence, ranks: tuple[int, ...], schedule: Schedule, virtual: int) -> Iterator[Violation]:
    name, microbatches = evidence.case.schedule, evidence.case.microbatches
    held, home = peaks(schedule), schedule.placement
    for stage, peak in enumerate(held.stage.tolist()):
        if peak > (bound := _bound(evidence, stage, virtual)):
            rank, limit = ranks[home[stage]], f"at most {bound}"
            yield Violation(IN_SCHEDULE, limit, str(peak), rank=rank, stage=stage, excess=_excess(peak, bound))
    for place, peak in enumerate(held.rank.tolist() if schedule.stages > len(ranks) else ()):
        bound = rank_in_flight_bound(name, place, len(ranks), microbatches, virtual)
        if peak > bound:
            what = f"{IN_SCHEDULE}, all stages of the rank"
            yield Violation(what, f"at most {bound}", str(peak), rank=ranks[place], excess=_excess(peak, bound))


def _excess(peak: int, bound: int) -> float:
    return peak / bound if bound else float("inf")


def _bound(evidence: Evidence, stage: int, virtual: int) -> int:
    """What a stage may hold: nothing where the family has no such stage."""
    case = evidence.case
    stages = case.topology.size("pp") * (FAMILIES[case.schedule].virtual or virtual)
    if stage >= stages:
        return 0
    return in_flight_bound(case.schedule, stage, case.topology.size("pp"), case.microbatches, virtual)
