"""schedule.activations: no stage and no rank holds more microbatches than its schedule promises.

It counts microbatches, not bytes; memory that no saved tensor holds is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from invariants.catalog.pipelines import no_family, pipelines, stages_a_rank
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.activations import in_flight
from invariants.schedule.formulas import in_flight_bound, rank_in_flight_bound
from invariants.schedule.table import B, F, Schedule, W


@invariant("schedule.activations", needs=[Section.SCHEDULE], applies=no_family)
def schedule_activations(evidence: Evidence) -> Iterator[Violation]:
    """Each stage, and each rank, holds at most as many microbatches as its family's bound says, in the schedule and,
    where they were recorded, at run time; none between steps.
    """
    virtual = 1
    for ranks, schedule in pipelines(evidence):
        virtual = stages_a_rank(evidence.case.schedule, schedule)
        yield from _in_schedule(evidence, ranks, schedule, virtual)
    for seen in evidence.activations or ():
        place = partial(Violation, rank=seen.rank, stage=seen.stage, step=seen.step)
        bound = _bound(evidence, seen.stage, virtual)
        if seen.peak > bound:
            yield place("microbatches held at run time", f"at most {bound}", str(seen.peak), excess=seen.peak / bound)
        if seen.left:
            yield place("microbatches held after the step", "0", str(seen.left), excess=seen.left)


def _in_schedule(evidence: Evidence, ranks: tuple[int, ...], schedule: Schedule, virtual: int) -> Iterator[Violation]:
    what = "microbatches in flight in the schedule"
    for stage, peak in sorted(in_flight(schedule).items()):
        if peak > (bound := _bound(evidence, stage, virtual)):
            rank = ranks[int(schedule.rank[schedule.stage == stage][0])]
            yield Violation(what, f"at most {bound}", str(peak), rank=rank, stage=stage, excess=peak / bound)
    if schedule.stages == len(ranks):
        return
    gained = (schedule.op == F).astype(np.int64) - ((schedule.op == B) | (schedule.op == W))
    name, microbatches = evidence.case.schedule, evidence.case.microbatches
    for place, rank in enumerate(ranks):
        mine = gained[schedule.starts[place] : schedule.starts[place + 1]]
        peak = int(mine.cumsum().max(initial=0))
        bound = rank_in_flight_bound(name, place, len(ranks), microbatches, virtual)
        if peak > bound:
            yield Violation(f"{what}, all stages of the rank", f"at most {bound}", str(peak), rank=rank)


def _bound(evidence: Evidence, stage: int, virtual: int) -> int:
    case = evidence.case
    return in_flight_bound(case.schedule, stage, case.topology.size("pp"), case.microbatches, virtual)
