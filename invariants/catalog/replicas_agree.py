"""replicas.agree: copies of one parameter are equal, bit by bit.

Copies that are equal may all be wrong, and an all-gather makes them equal whatever went in: gradients.reference and
parameters.reference look at the values.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.recorded import something
from invariants.evidence import Evidence, Print, Section
from invariants.invariant import Violation, invariant


@invariant("replicas.agree", needs=[Section.REPLICAS])
def replicas_agree(evidence: Evidence) -> Iterator[Violation]:
    """Every replica of a parameter has the same norm and the same bits before the first step, after each step and after
    a load.

    Replicas are pieces of one name that cover the same elements on several ranks, tied copies included.
    """
    first: dict[tuple[int, bool, str, int, int], tuple[int, Print]] = {}
    for snapshot in something("parameters", evidence.replicas):
        for piece in snapshot.prints:
            key = (snapshot.step, snapshot.loaded, piece.name, piece.lo, piece.hi)
            holder, copy = first.setdefault(key, (snapshot.rank, piece))
            if (copy.digest, copy.dtype) == (piece.digest, piece.dtype):
                continue
            yield Violation(
                f"elements {piece.lo} to {piece.hi - 1}" + (", after a load" if snapshot.loaded else ""),
                f"the bits of rank {holder}, {copy.dtype}, norm {copy.norm!r}",
                f"other bits, {piece.dtype}, norm {piece.norm!r}",
                rank=snapshot.rank,
                step=snapshot.step,
                tensor=piece.name,
                excess=abs(piece.norm - copy.norm),
            )
