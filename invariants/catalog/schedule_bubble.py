"""schedule.bubble: a schedule is as idle as its formula says.

It sees the order of computation only. Latency, overlap with communication and real durations are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from invariants.catalog.pipelines import no_family, pipelines, stages_a_rank
from invariants.errors import UsageError
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.costs import Costs
from invariants.schedule.formulas import idle_share, makespan_bounds, own_idle
from invariants.schedule.table import Schedule
from invariants.schedule.timeline import NeverEnds, simulate

COSTS: Final = (Costs(1, 1, 1), Costs(2, 3, 1))
"""Every family has closed forms at these: F, I and W alike, and W < F < I as in most models."""


@invariant("schedule.bubble", needs=[Section.SCHEDULE], applies=no_family)
def schedule_bubble(evidence: Evidence) -> Iterator[Violation]:
    """Each rank idles as its family's closed forms say at equal stage costs, of the makespan and in its own span; at
    unequal ones GPipe's makespan is its formula, and 1F1B's lies within its bounds.

    Exact rationals, zero latency; F, I, W = 1, 1, 1 and 2, 3, 1, a full backward being I + W.
    """
    for ranks, schedule in pipelines(evidence):
        try:
            for costs in COSTS:
                yield from _idle(evidence.case.schedule, evidence.case.microbatches, ranks, schedule, costs)
            yield from _at_unequal_stages(evidence.case.schedule, evidence.case.microbatches, ranks, schedule)
        except (NeverEnds, UsageError) as error:
            yield Violation("idle share", "a schedule that ends", str(error), rank=ranks[0])


def _idle(
    name: str, microbatches: int, ranks: tuple[int, ...], schedule: Schedule, costs: Costs
) -> Iterator[Violation]:
    virtual = stages_a_rank(name, schedule)
    timeline = simulate(schedule, costs)
    at = f"at F={costs.forward}, I={costs.input_gradient}, W={costs.weight_gradient}"
    share = idle_share(name, len(ranks), microbatches, virtual, costs)
    for place, (rank, seen) in enumerate(zip(ranks, timeline.idle_share, strict=True)):
        if seen != share:
            what, stage = f"idle share of the makespan {at}", place if schedule.stages == len(ranks) else None
            yield Violation(what, str(share), str(seen), rank=rank, stage=stage, excess=float(abs(seen - share)))
    own = own_idle(name, len(ranks), microbatches, virtual, costs)
    longest = max(timeline.own_idle)
    if longest != own:
        rank = ranks[timeline.own_idle.index(longest)]
        yield Violation(f"longest own span less its work {at}", str(own), str(longest), rank=rank)


def _at_unequal_stages(name: str, microbatches: int, ranks: tuple[int, ...], schedule: Schedule) -> Iterator[Violation]:
    if name not in ("gpipe", "1f1b"):
        return
    stages = len(ranks)
    unequal = [Fraction(1 + stage % 3) for stage in range(stages)]
    low, high = makespan_bounds(name, unequal, [2 * cost for cost in unequal], microbatches)
    observed = simulate(schedule, Costs(unequal, unequal, unequal)).makespan
    if not low <= observed <= high:
        yield Violation("makespan at unequal stage costs", f"{low} to {high}", str(observed), rank=ranks[0])
