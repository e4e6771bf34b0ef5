"""gradients.reference: the reduced gradient is that of one process.

It compares raw gradients, since Adam and clipping hide any factor; what the optimizer makes of them is
parameters.reference's to see.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.deviations import beyond
from invariants.catalog.recorded import something
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant


@invariant("gradients.reference", needs=[Section.GRADIENTS])
def gradients_reference(evidence: Evidence) -> Iterator[Violation]:
    """Gradients as reduced, before the update, equal those of a single process at the same parameters, by the tolerance
    rule; a gradient that is missing is not a zero.
    """
    return beyond(something("gradients", evidence.gradients), "gradient")
