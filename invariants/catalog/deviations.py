"""From recorded deviations to violations: the last step of the tolerance rule, for all comparisons with a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from invariants.evidence import Deviation
from invariants.invariant import Violation


def beyond(deviations: Iterable[Deviation], what: str) -> Iterator[Violation]:
    """Yield what is beyond its tolerance; a NaN is, and a missing tensor whose reference is not zero."""
    for seen in deviations:
        if seen.missing:
            if abs(seen.expected) <= seen.tolerance:
                continue
            observed = "no such tensor" if seen.rank >= 0 else "held by no rank"
        elif seen.error <= seen.tolerance:
            continue
        else:
            observed = repr(seen.observed)
        yield Violation(
            f"{what}, element {seen.index}, tolerance {seen.tolerance:.3g}",
            repr(seen.expected),
            observed,
            rank=seen.rank if seen.rank >= 0 else None,
            step=seen.step,
            tensor=seen.name,
            excess=excess(seen.error, seen.tolerance),
        )


def excess(error: float, tolerance: float) -> float:
    """The error as a multiple of its tolerance."""
    return error / tolerance if tolerance and math.isfinite(error) else math.inf
