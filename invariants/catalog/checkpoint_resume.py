"""checkpoint.resume: training that was resumed goes on as if it had not stopped.

A load that gives back equal parameters and loses moments or a step counter gives the right first loss and gradient;
only parameters after a further step differ, and some faults need two.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.case import Case
from invariants.catalog.deviations import beyond
from invariants.catalog.places import changed
from invariants.catalog.recorded import demand, ranks_and_steps
from invariants.evidence import Evidence, Resume, Section
from invariants.invariant import Violation, invariant

STEPS = 2
"""Steps after the save below which a resumed run says too little."""


def goes_on(case: Case) -> str | None:
    """None where the history saves and then makes enough steps."""
    if case.save_after is None:
        return "the history saves nothing"
    further = len(case.windows) - case.save_after
    return None if further >= STEPS else f"steps after the save: {further}; judged from {STEPS} on"


@invariant("checkpoint.resume", needs=[Section.RESUME], applies=goes_on)
def checkpoint_resume(evidence: Evidence) -> Iterator[Violation]:
    """Training resumed by fresh processes equals the uninterrupted run over at least two further steps: bit for bit
    where the target promises it, else its gradients and updates are a reference's, by the tolerance rule.
    """
    if evidence.resume is None or evidence.case.save_after is None:
        raise LookupError("section resume was not recorded")
    first, last = evidence.case.save_after + 1, len(evidence.case.windows)
    if evidence.promises.resume == "bitwise":
        places = ranks_and_steps(evidence.case.topology.world_size, first, last)
        yield from _bitwise(evidence.resume, places)
    else:
        steps = {seen.step for seen in evidence.resume.deviations}
        demand("resumed run against a reference, step", range(first, last + 1), steps)
        yield from beyond(evidence.resume.deviations, "gradient or update of the resumed run")


def _bitwise(resume: Resume, places: list[tuple[int, int]]) -> Iterator[Violation]:
    runs = []
    for what, snapshots in (("uninterrupted", resume.uninterrupted), ("resumed", resume.resumed)):
        runs.append({(snapshot.rank, snapshot.step): snapshot.prints for snapshot in snapshots})
        demand(f"parameters of the {what} run, rank and step", places, runs[-1])
    uninterrupted, resumed = runs
    for rank, step in places:
        what = "parameter of the resumed run"
        yield from changed(what, uninterrupted[rank, step], resumed[rank, step], rank=rank, step=step)
