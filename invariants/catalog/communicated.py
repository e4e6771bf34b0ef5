"""What the ranks of a case communicated, run by run: the one from the start, and the one after a load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from invariants.case import Case
from invariants.catalog.recorded import demand, ranks_and_steps
from invariants.communication import POINT_TO_POINT, Operation
from invariants.contract import Mismatch
from invariants.evidence import Evidence, Posted
from invariants.invariant import NotApplicable, Violation


def several_ranks(case: Case) -> str | None:
    """For `applies`: one rank has nobody to agree with."""
    return None if case.topology.world_size > 1 else "one rank, which sends nothing to others"


@dataclass
class Run:
    """Operations of each rank, in the order in which it posted them."""

    resumed: bool
    records: dict[int, list[Operation]] = field(default_factory=dict)
    places: dict[tuple[int, int], Posted] = field(default_factory=dict)
    """By rank and number of the operation."""

    def violation(self, what: str, expected: str, observed: str, operation: Operation, rank: int) -> Violation:
        """One of `rank`, in the step of `operation`."""
        place = self.places[operation.rank, operation.number]
        when = "" if place.inside else ", after the step" if place.step else ", while it was built"
        loaded = ", after a load" if self.resumed else ""
        return Violation(f"{what}{when}{loaded}", expected, observed, rank=rank, step=place.step)

    def mismatched(self, mismatch: Mismatch) -> Violation:
        """`mismatch` as a violation of the second of its ranks."""
        one = mismatch.one
        what = f"{mismatch.where}, {mismatch.feature}"
        rank = mismatch.rank if mismatch.rank >= 0 else one.rank
        return self.violation(what, f"as on rank {one.rank}: {one}", mismatch.observed, one, rank)


def runs(evidence: Evidence) -> Iterator[Run]:
    """Each run of the case; `LookupError` where a rank or a step of it was not recorded."""
    recorded = evidence.communication or ()
    ranks, steps = evidence.case.topology.world_size, len(evidence.case.windows)
    for resumed in (False, True):
        run = Run(resumed, {rank: [] for rank in range(ranks)})
        inside = set()
        for posted in recorded:
            if posted.resumed is resumed:
                inside |= {(posted.rank, posted.step)} if posted.inside else set()
                run.records[posted.rank] += posted.operations
                run.places |= {(posted.rank, operation.number): posted for operation in posted.operations}
        if inside or not resumed:
            first = 1 + (evidence.case.save_after or 0) if resumed else 1
            demand("communication of rank and step", ranks_and_steps(ranks, first, steps), inside)
            for operations in run.records.values():
                operations.sort(key=lambda operation: operation.number)
            yield run


def of_messages(evidence: Evidence) -> list[Run]:
    """As `runs`; `NotApplicable` where no message is sent or received in any of them."""
    found = list(runs(evidence))
    kinds = {operation.kind for run in found for operations in run.records.values() for operation in operations}
    if not kinds & POINT_TO_POINT:
        raise NotApplicable("no rank sends a message to another one")
    return found
