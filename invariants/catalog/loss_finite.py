"""loss.finite: the loss that is reported is a number, and the right one.

A loss is computed before the update, so a wrong update shows in it one step later at the earliest; gradients.reference
and parameters.reference look at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from invariants.catalog.deviations import excess
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
    known = {loss.step for loss in losses if loss.reported is not None}
    for step in range(1, steps + 1):
        if step not in known:
            yield Violation("reported loss", "a number on at least one rank", "None on every rank", step=step)
    for loss in losses:
        place = partial(Violation, rank=loss.rank, step=loss.step)
        if not loss.finite:
            yield place("parameters after the step", "finite numbers", "NaN or infinity")
        if loss.reported is None:
            continue
        error = abs(loss.reported - loss.reference)
        if not math.isfinite(loss.reported):
            yield place("reported loss", f"a finite number, {loss.reference!r}", repr(loss.reported))
        elif not error <= loss.tolerance:
            what = f"reported loss, tolerance {loss.tolerance:.3g}"
            times = excess(error, loss.tolerance)
            yield place(what, repr(loss.reference), repr(loss.reported), excess=times)
