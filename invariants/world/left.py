"""What a test or an example leaves of its communication, and whether its world can go on with the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from invariants.communication import SEND


@dataclass(frozen=True)
class Left:
    """What a test or example has left of its communication on one rank."""

    cached: tuple[tuple[int, ...], ...]
    """The groups of the context's cache, in the order of their creation."""
    opened: dict[str, tuple[int, ...]]
    """Members of the groups beside them, by torch's name."""
    created: int
    """Groups that the world has made so far: torch numbers the next one by it."""
    counts: dict[tuple[Any, ...], int]
    """Operations since the last reset, see `invariants.communication.Operation.sequence`."""
    members: dict[str, tuple[int, ...]]
    """Of the groups in `counts`."""


def in_step(left: Sequence[Left | None]) -> bool:
    """Whether the ranks of a world, in rank order, can go on together.

    They know the same groups, each member has issued as many collectives in a group as the others, and each message
    that was sent was received: what one has issued and another has not would pair with the next example's.
    """
    ranks = [each for each in left if each is not None]
    if len(ranks) < len(left) or len({(each.cached, each.created) for each in ranks}) > 1:
        return False
    for each in ranks:
        for name, members in each.opened.items():
            if any(name not in ranks[member].opened for member in members):
                return False
    messages: Counter[tuple[Any, ...]] = Counter()
    for each in ranks:
        for (group, device, kind, *ends), count in each.counts.items():
            if kind == "collective":
                key = group, device, kind
                if any(ranks[member].counts.get(key) != count for member in each.members[group]):
                    return False
            elif kind == SEND:
                messages[(group, device, ends[1], ends[2])] += count
            else:
                messages[(group, device, ends[1], ends[2])] -= count
    return not any(messages.values())
