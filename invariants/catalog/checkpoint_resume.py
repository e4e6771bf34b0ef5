"""checkpoint.resume: training that was resumed goes on as if it had not stopped.

A load that gives back equal parameters and loses moments or a step counter gives the right first loss and gradient;
only parameters after a further step differ, and some faults need two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from invariants.case import Case
from invariants.catalog import losses
from invariants.catalog.deviations import beyond
from invariants.catalog.places import changed
from invariants.catalog.recorded import demand, ranks_and_steps
from invariants.evidence import Deviation, Evidence, Loss, Resume, Section
from invariants.invariant import NotApplicable, Violation, invariant

STEPS = 2
"""Steps after the save below which a resumed run says too little."""
RESUMED = " of the resumed run"


def goes_on(case: Case) -> str | None:
    """None where the history saves and then makes enough steps."""
    if case.save_after is None:
        return "the history saves nothing"
    further = len(case.windows) - case.save_after
    return None if further >= STEPS else f"steps after the save: {further}; judged from {STEPS} on"


@invariant("checkpoint.resume", needs=[Section.RESUME], applies=goes_on)
def checkpoint_resume(evidence: Evidence) -> Iterator[Violation]:
    """Training resumed by fresh processes equals the uninterrupted run over at least two further steps: parameters and
    losses bit for bit where the target promises it, else gradients, updates and losses are a reference's, by the
    tolerance rule.

    Without a promise of bits, what deviates from the reference in the uninterrupted run as well is not held against the
    load.
    """
    resume = evidence.resume
    if resume is None or evidence.case.save_after is None:
        raise LookupError("section resume was not recorded")
    first, last = evidence.case.save_after + 1, len(evidence.case.windows)
    places = ranks_and_steps(evidence.case.topology.world_size, first, last)
    if resume.losses:
        demand("loss of the resumed run, rank and step", places, {(loss.rank, loss.step) for loss in resume.losses})
    if evidence.promises.resume == "bitwise":
        yield from _other_bits(resume, places)
        yield from _other_losses(resume.losses, evidence.losses or ())
    else:
        steps = {seen.step for seen in resume.deviations}
        demand("resumed run against a reference, step", range(first, last + 1), steps)
        yield from _other_than_reference(evidence, resume, first, last)


def _other_bits(resume: Resume, places: list[tuple[int, int]]) -> Iterator[Violation]:
    runs = []
    for what, snapshots in (("uninterrupted", resume.uninterrupted), ("resumed", resume.resumed)):
        runs.append({(snapshot.rank, snapshot.step): snapshot.prints for snapshot in snapshots})
        demand(f"parameters of the {what} run, rank and step", places, runs[-1])
    uninterrupted, resumed = runs
    for rank, step in places:
        yield from changed(f"parameter{RESUMED}", uninterrupted[rank, step], resumed[rank, step], rank=rank, step=step)


def _other_losses(resumed: Iterable[Loss], uninterrupted: Iterable[Loss]) -> Iterator[Violation]:
    """What was reported after the load and not without one; a NaN in both runs is not the load's."""
    before = {(loss.rank, loss.step): (repr(loss.reported), loss.finite) for loss in uninterrupted}
    other = [loss for loss in resumed if before.get((loss.rank, loss.step)) != (repr(loss.reported), loss.finite)]
    yield from losses.wrong(other, RESUMED)
    for loss in other:
        if loss.reported is None and not math.isnan(loss.reference):
            expected = repr(loss.reference)
            yield Violation(f"reported loss{RESUMED}", expected, "None", rank=loss.rank, step=loss.step)


def _other_than_reference(evidence: Evidence, resume: Resume, first: int, last: int) -> Iterator[Violation]:
    found = _wrong(resume.deviations, resume.losses, first, last, RESUMED)
    uninterrupted = (*(evidence.gradients or ()), *(evidence.updates or ()))
    before = {_subject(violation) for violation in _wrong(uninterrupted, evidence.losses or (), first, last, "")}
    own = [violation for violation in found if _subject(violation) not in before]
    if found and not own:
        tensors = any(violation.tensor for violation in found)
        see = "gradients.reference and parameters.reference" if tensors else "loss.finite"
        raise NotApplicable(f"the uninterrupted run deviates from the reference as well: see {see}")
    yield from own


def _wrong(
    deviations: Iterable[Deviation], reported: Sequence[Loss], first: int, last: int, run: str
) -> list[Violation]:
    """What is not as the reference has it, after the save."""
    found = [*beyond((seen for seen in deviations if seen.step >= first), f"gradient or update{run}")]
    later = [loss for loss in reported if loss.step >= first]
    return [*found, *losses.wrong(later, run), *(losses.unknown(later, first, last, run) if later else ())]


def _subject(violation: Violation) -> tuple[str | None, int | None]:
    """The tensor on whatever rank; for a loss, the rank."""
    return violation.tensor, violation.rank if violation.tensor is None else None
