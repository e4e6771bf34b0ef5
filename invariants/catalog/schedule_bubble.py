"""schedule.bubble: a schedule is as idle as its formula says.

It sees the order of computation only. Latency, overlap and real durations are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from invariants.catalog.pipelines import known_family, pipelines
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.costs import Costs
from invariants.schedule.formulas import idle_share, makespan
from invariants.schedule.timeline import NeverEnds, simulate


@invariant("schedule.bubble", needs=[Section.SCHEDULE], applies=lambda case: known_family(case.schedule))
def schedule_bubble(evidence: Evidence) -> Iterator[Violation]:
    """Each rank idles (N-1)/(M+N-1) of the makespan at equal stage costs, GPipe and 1F1B; at unequal costs the makespan
    is GPipe's formula, or lies within 1F1B's bounds.

    Exact rationals, zero latency, one stage a rank, full backward twice the forward where costs are equal.
    """
    case = evidence.case
    for ranks, schedule in pipelines(evidence):
        stages = len(ranks)
        unequal = [Fraction(1 + stage % 3) for stage in range(stages)]
        low, high = makespan(case.schedule, unequal, [2 * cost for cost in unequal], case.microbatches)
        try:
            shares = simulate(schedule, Costs(1, 1, 1)).idle_share
            observed = simulate(schedule, Costs(unequal, unequal, unequal)).makespan
        except NeverEnds as error:
            yield Violation("idle share", "a schedule that ends", str(error), rank=ranks[0])
            continue
        expected = idle_share(case.schedule, stages, case.microbatches)
        for stage, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
            if share != expected:
                excess = float(abs(share - expected))
                yield Violation("idle share", str(expected), str(share), rank=rank, stage=stage, excess=excess)
        if not low <= observed <= high:
            yield Violation("makespan at unequal stage costs", f"{low} to {high}", str(observed), rank=ranks[0])
