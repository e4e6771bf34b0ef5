"""From recorded losses to violations, for the uninterrupted run and for a resumed one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

from invariants.catalog.deviations import excess
from invariants.evidence import Loss
from invariants.invariant import Violation


def wrong(losses: Iterable[Loss], run: str = "") -> Iterator[Violation]:
    """Yield each loss that is not finite or beyond its tolerance, and parameters that are not finite; None is no loss.

    `run` is put behind what is named, ` of the resumed run`.
    """
    for loss in losses:
        place = partial(Violation, rank=loss.rank, step=loss.step)
        if not loss.finite:
            yield place(f"parameters after the step{run}", "finite numbers", "NaN or infinity")
        if loss.reported is None:
            continue
        error = abs(loss.reported - loss.reference)
        if not math.isfinite(loss.reported):
            yield place(f"reported loss{run}", f"a finite number, {loss.reference!r}", repr(loss.reported))
        elif not error <= loss.tolerance:
            what = f"reported loss{run}, tolerance {loss.tolerance:.3g}"
            times = excess(error, loss.tolerance)
            yield place(what, repr(loss.reference), repr(loss.reported), excess=times)


def unknown(losses: Iterable[Loss], first: int, last: int, run: str = "") -> Iterator[Violation]:
    """Yield each step from `first` to `last` whose loss no rank reports."""
    known = {loss.step for loss in losses if loss.reported is not None}
    for step in range(first, last + 1):
        if step not in known:
            yield Violation(f"reported loss{run}", "a number on at least one rank", "None on every rank", step=step)
