"""replicas.agree: copies of one parameter are equal, bit by bit.

Copies that are equal may all be wrong, and an all-gather makes them equal whatever went in: gradients.reference and
parameters.reference look at the values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from invariants.catalog.places import ranks_in_words, span
from invariants.catalog.recorded import something
from invariants.evidence import Evidence, Print, Section, Snapshot
from invariants.invariant import Violation, invariant


@invariant("replicas.agree", needs=[Section.REPLICAS])
def replicas_agree(evidence: Evidence) -> Iterator[Violation]:
    """Every replica of a parameter has the same norm and the same bits before the first step, after each step and after
    a load.

    Replicas are pieces of one name that cover the same elements on several ranks, tied copies included. Pieces that
    overlap otherwise cannot be compared by digests, and leave it unknown.
    """
    snapshots = something("parameters", evidence.replicas)
    differing = list(_differing(snapshots))
    if not differing:
        _demand_comparable(snapshots)
    yield from differing


def _differing(snapshots: Sequence[Snapshot]) -> Iterator[Violation]:
    first: dict[tuple[int, bool, str, int, int], tuple[int, Print]] = {}
    for snapshot in snapshots:
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


def _demand_comparable(snapshots: Sequence[Snapshot]) -> None:
    """Raise `LookupError` where pieces of one name share some elements and not all."""
    places: dict[tuple[str, int, bool], dict[tuple[int, int], set[int]]] = defaultdict(lambda: defaultdict(set))
    for snapshot in snapshots:
        for piece in snapshot.prints:
            if piece.lo < piece.hi:
                places[piece.name, snapshot.step, snapshot.loaded][piece.lo, piece.hi].add(snapshot.rank)
    for (name, step, _), ranges in places.items():
        # Sorted, so that where any two overlap, two neighbours do.
        for left, right in pairwise(sorted(ranges)):
            if right[0] < left[1]:
                held = (f"{span(*place)} on {ranks_in_words(sorted(ranges[place]))}" for place in (left, right))
                raise LookupError(
                    f"{name}, step {step}: {' and '.join(held)} overlap without being the same range: digests cannot "
                    "tell whether they agree"
                )
