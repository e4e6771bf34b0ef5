"""collectives.agree: the members of a group take part in the same collectives.

Collectives are paired by their order alone, and gloo compares nothing: one that a rank leaves out pairs with its next
one, float32 is summed with int32, and a run goes on with wrong numbers, or with right ones for a while.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.communicated import runs, several_ranks
from invariants.communication import POINT_TO_POINT
from invariants.contract import disagreements
from invariants.evidence import Evidence, Section
from invariants.invariant import NotApplicable, Violation, invariant


@invariant("collectives.agree", needs=[Section.COMMUNICATION], applies=several_ranks)
def collectives_agree(evidence: Evidence) -> Iterator[Violation]:
    """The k-th collective of a group is the same kind, shape, dtype, reduction and root on each of its members, and all
    take part in as many; what one says that another sends it, in parts of uneven sizes, is what that one sends.

    All ranks open groups in one order; those with local synchronization are opened by their members alone. Of a group
    that is out of step only the first place is told.
    """
    found = list(runs(evidence))
    kinds = {operation.kind for run in found for operations in run.records.values() for operation in operations}
    if not kinds - POINT_TO_POINT:
        raise NotApplicable("no rank takes part in a collective")
    for run in found:
        yield from map(run.mismatched, disagreements(run.records))
