"""The smallest part of a schedule that still deadlocks, to show where the fault lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from invariants.errors import UsageError
from invariants.schedule.matching import peer_ranks
from invariants.schedule.order import sticks
from invariants.schedule.table import Schedule


def smallest(schedule: Schedule, transport: str) -> Schedule:
    """A part that sticks in the same way, from which no single rank and no single microbatch can be left out.

    A microbatch goes with all that is done for it, a rank with its stages and the messages to and from them; stages
    and microbatches keep their numbers, ranks are counted anew. Microbatches go first: what is left of a large schedule
    is then small. A schedule that ends is a `UsageError`.
    """
    how = sticks(schedule, transport)
    if how is None:
        raise UsageError(f"schedule: it ends on transport {transport}: expected one that does not")

    def same(part: Schedule) -> bool:
        # A cycle is not to become a loss: what ranks wait for may be left out with the rest.
        return sticks(part, transport) == how

    part, size = schedule, (0, 0)
    while size != (part.ranks, len(part)):
        size = part.ranks, len(part)
        numbers = np.unique(part.microbatch[part.microbatch >= 0]).tolist()
        part = _shrunk(part, numbers, _of_microbatches, same)
        part = _shrunk(part, range(part.ranks), _on_ranks, same)
    return part


def _shrunk(
    schedule: Schedule,
    items: Sequence[int],
    keep: Callable[[Schedule, Sequence[int]], Schedule],
    same: Callable[[Schedule], bool],
) -> Schedule:
    return keep(schedule, _fewest(items, lambda some: same(keep(schedule, some))))


def _on_ranks(schedule: Schedule, ranks: Sequence[int]) -> Schedule:
    here = np.zeros(schedule.ranks + 1, np.bool_)  # the last one is for -1: messages that no rank is there to take
    here[[*ranks, -1]] = True
    lost = schedule.exchanges & ~here[peer_ranks(schedule)]
    return schedule.kept(here[schedule.rank] & ~lost, np.array(ranks, np.int64))


def _of_microbatches(schedule: Schedule, numbers: Sequence[int]) -> Schedule:
    return schedule.kept((schedule.microbatch < 0) | np.isin(schedule.microbatch, numbers))


def _fewest(items: Sequence[int], stuck: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """Leave out ever smaller pieces for as long as it stays stuck (Zeller and Hildebrandt, TSE 28(2), 2002)."""
    kept, size = list(items), max(1, len(items) // 2)
    while True:
        before, start = len(kept), 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fewer and stuck(fewer):
                kept = fewer
            else:
                start += size
        if len(kept) == before:
            if size == 1:
                return kept
            size //= 2
