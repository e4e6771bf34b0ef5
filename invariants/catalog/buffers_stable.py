"""buffers.stable: buffers of messages are left alone while they are under way.

Whether an overwritten send buffer does harm is a race, which small messages mostly win: so the buffer is judged, and
not what arrives.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.communicated import of_messages, several_ranks
from invariants.communication import CHANGED, POINT_TO_POINT, UNWRITTEN, Operation
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant


@invariant("buffers.stable", needs=[Section.COMMUNICATION], applies=several_ranks)
def buffers_stable(evidence: Evidence) -> Iterator[Violation]:
    """The buffer of a message holds the same bytes when its send is done as when it was posted; the buffer of a receive
    is overwritten up to its end.
    """
    unknown: list[Operation] = []
    stable = True
    for run in of_messages(evidence):
        for rank, operations in run.records.items():
            for operation in operations:
                if operation.flags & CHANGED:
                    yield run.violation(str(operation), "the bytes that were posted", "others", operation, rank)
                if operation.flags & UNWRITTEN:
                    yield run.violation(str(operation), "a full buffer", "its end was not written", operation, rank)
                stable &= not operation.flags
                if operation.kind in POINT_TO_POINT and not _watched(operation):
                    unknown.append(operation)
    if stable and unknown:
        first = unknown[0]
        why = "nobody waited for it" if first.device == "cpu" else f"buffers on {first.device} are not watched"
        raise LookupError(f"rank {first.rank}'s {first}: {why}: whether its buffer was left alone is not known")


def _watched(operation: Operation) -> bool:
    return operation.device == "cpu" and operation.completed > 0
