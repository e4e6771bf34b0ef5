"""losses.agree: a loss is one number, whoever reports it.

A rank that averages its own part, or reports the loss of another step, is seen; whether the number is right is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants import Evidence, Section, Violation, invariant


@invariant("losses.agree", needs=[Section.LOSSES])
def losses_agree(evidence: Evidence) -> Iterator[Violation]:
    """All ranks that report the loss of a step report the same bits."""
    first: dict[int, tuple[int, float]] = {}
    for loss in evidence.losses or ():
        if loss.reported is None:
            continue
        rank, reported = first.setdefault(loss.step, (loss.rank, loss.reported))
        if loss.reported.hex() != reported.hex():
            expected = f"{reported!r}, as on rank {rank}"
            yield Violation("reported loss", expected, repr(loss.reported), rank=loss.rank, step=loss.step)
