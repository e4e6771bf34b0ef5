"""parameters.reference: the update is the optimizer's.

Updates are judged on the observed gradients, right or wrong; whether those are right is gradients.reference's to see.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.deviations import beyond
from invariants.catalog.recorded import something
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant


@invariant("parameters.reference", needs=[Section.UPDATES])
def parameters_reference(evidence: Evidence) -> Iterator[Violation]:
    """Each update equals a reference optimizer's on the observed gradients; in float64, parameters after k steps equal
    the reference's, where that was recorded.
    """
    yield from beyond(something("updates", evidence.updates), "parameter after the update")
    yield from beyond(evidence.trajectory or (), "parameter after all steps so far")
