"""loss.finite: the loss that is reported is a number, and the right one.

A loss is computed before the update, so a wrong update shows in it one step later at the earliest; gradients.reference
and parameters.reference look at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.losses import unknown, wrong
from invariants.catalog.recorded import demand, ranks_and_steps
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant


@invariant("loss.finite", needs=[Section.LOSSES])
def loss_finite(evidence: Evidence) -> Iterator[Violation]:
    """No loss and no parameter is NaN or infinite, up to the last step, on any rank; a reported loss is the reference's
    at the same parameters, by the tolerance rule.

    A rank may report None where it does not know the loss, but at least one rank knows it in each step.
    """
    losses = evidence.losses or ()
    steps = len(evidence.case.windows)
    wanted = ranks_and_steps(evidence.case.topology.world_size, 1, steps)
    demand("loss of rank and step", wanted, {(loss.rank, loss.step) for loss in losses})
    yield from unknown(losses, 1, steps)
    yield from wrong(losses)
