"""Places of pieces in their whole: how they are written, and digests of one place compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from invariants.evidence import Print
from invariants.invariant import Violation

Place = tuple[str, str, int, int, int]


def span(lo: int, hi: int) -> str:
    """The elements `lo..hi-1` in words."""
    if hi - lo == 1:
        return f"element {lo}"
    return f"elements {lo} to {hi - 1}" if lo < hi else "no elements"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """One rank or several in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def changed(
    what: str, before: Iterable[Print], after: Iterable[Print], *, rank: int, step: int | None
) -> Iterator[Violation]:
    """Yield each place that has other bytes after than before, or is there on one side only."""
    old, new = _by_place(before), _by_place(after)
    for place in {**old, **new}:
        left, right = old.get(place), new.get(place)
        excess = math.inf
        if left is not None and right is not None:
            if (left.dtype, left.digest) == (right.dtype, right.digest):
                continue
            excess = abs(left.norm - right.norm)
        name, state_key, lo, hi, _ = place
        yield Violation(
            f"{what}{state_key and ' ' + state_key}, {span(lo, hi)}",
            _bits(left),
            _bits(right),
            rank=rank,
            step=step,
            tensor=name,
            excess=excess,
        )


def _by_place(prints: Iterable[Print]) -> dict[Place, Print]:
    """By name, state key and range; pieces that share all of these are told apart by their order."""
    before: Counter[tuple[str, str, int, int]] = Counter()
    found = {}
    for piece in prints:
        place = (piece.name, piece.state_key or "", piece.lo, piece.hi)
        found[(*place, before[place])] = piece
        before[place] += 1
    return found


def _bits(piece: Print | None) -> str:
    return f"bits {piece.digest}, {piece.dtype}, norm {piece.norm!r}" if piece else "nothing"
