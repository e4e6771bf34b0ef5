"""schedule.balanced: no other split of the layers has a smaller largest stage.

It goes by the costs that the target tells; whether these are true it cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from invariants.case import Case
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant
from invariants.schedule.balance import balance

_UNIT_ROUNDOFF = Fraction(1, 2**53)


def _prescribed(case: Case) -> str | None:
    return None if case.split is None else f"the case prescribes the split {'+'.join(map(str, case.split))}"


@invariant("schedule.balanced", needs=[Section.LAYERS], applies=_prescribed)
def schedule_balanced(evidence: Evidence) -> Iterator[Violation]:
    """The largest stage costs no more than that of the best split into as many contiguous stages, by the costs of
    layers that the target tells, the same on every rank.
    """
    assert evidence.layers is not None
    for rank, told in enumerate(evidence.layers):
        if told != evidence.layers[0]:
            yield Violation("costs of layers", _text(evidence.layers[0]), _text(told), rank=rank)
    stages = evidence.layers[0]
    found = balance([cost for stage in stages for cost in stage], [len(stage) for stage in stages])
    # A split found with float sums may miss the best by their rounding.
    allowed = found.least * (1 + 2 * len(stages) * _UNIT_ROUNDOFF * max(found.split))
    if found.largest > allowed:
        best, split = ("+".join(map(str, layers)) for layers in (found.best, found.split))
        stage = found.costs.index(found.largest)
        yield Violation(
            "largest stage",
            f"{float(found.least):g}, as with {best} layers",
            f"{float(found.largest):g}, with {split} layers",
            stage=stage,
            excess=float(found.largest / found.least),
        )


def _text(stages: tuple[tuple[float, ...], ...]) -> str:
    return " | ".join(" ".join(f"{cost:g}" for cost in stage) for stage in stages)
