"""Generators: the order of computation that each family of schedules prescribes, and which stages a rank holds.

Schedules hold computation only, `B` being the *full* backward (input and weight gradients together), or `I` and `W` its
halves; `lowering.lower` adds the sends and receives. With N ranks, M microbatches and v stages a rank there are vN
stages. What each family costs in time and memory is in `formulas`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from invariants.errors import UsageError
from invariants.schedule.families.one_for_one import gpipe, interleaved, one_forward_one_backward
from invariants.schedule.families.v_shaped import dualpipe_v, zb_v
from invariants.schedule.families.zero_bubble import zb_h1, zb_h2
from invariants.schedule.table import MAX_ACTIONS, Schedule


@dataclass(frozen=True)
class Family:
    """One family: what makes it from (ranks, microbatches, stages a rank), and the sizes it exists at.

    `virtual` is the number of stages a rank, None where any will do. It needs `least * ranks` microbatches, and one at
    the least.
    """

    build: Callable[[int, int, int], Schedule]
    virtual: int | None = None
    least: int = 0


def _fixed(build: Callable[[int, int], Schedule], virtual: int = 1, least: int = 0) -> Family:
    return Family(lambda ranks, microbatches, _: build(ranks, microbatches), virtual, least)


FAMILIES: Final[Mapping[str, Family]] = {
    "gpipe": _fixed(gpipe),
    "1f1b": _fixed(one_forward_one_backward),
    "interleaved-1f1b": Family(interleaved),
    "zb-h1": _fixed(zb_h1),
    "zb-h2": _fixed(zb_h2),
    "zb-v": _fixed(zb_v, virtual=2),
    "dualpipe-v": _fixed(dualpipe_v, virtual=2, least=2),
}
"""Each family by its name."""


def generate(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The family `name` on so many ranks, with `virtual` stages on each where the family leaves that open.

    A family whose ranks hold two stages takes `virtual` 1 or 2, and makes the same of either. A family that does not
    exist, sizes at which it does not, and sizes beyond `MAX_ACTIONS` are a `UsageError`.
    """
    family = checked(name, ranks, microbatches, virtual)
    stages = ranks * (family.virtual or virtual)
    # ZB-V is put together for 2N-1 microbatches at the least.
    actions = 2 * stages * max(microbatches, 2 * ranks - 1 if name == "zb-v" else 1)
    if actions > MAX_ACTIONS:
        size = f"ranks={ranks}, microbatches={microbatches}, virtual={virtual}"
        raise UsageError(f"schedule {name}: {size}: {actions} actions or more: expected at most {MAX_ACTIONS}")
    return family.build(ranks, microbatches, virtual)


def checked(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Family:
    """The family of that name; a `UsageError` where there is none, or none of these sizes."""
    if name not in FAMILIES:
        raise UsageError(f"schedule {name!r}: expected one of {', '.join(FAMILIES)}")
    for label, size in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if size < 1:
            raise UsageError(f"schedule {name}: {label}={size}: expected 1 or more")
    family = FAMILIES[name]
    if virtual not in (1, family.virtual or virtual):
        raise UsageError(f"schedule {name}: virtual={virtual}: expected {family.virtual}, its number of stages a rank")
    if microbatches < family.least * ranks:
        least = family.least * ranks
        raise UsageError(
            f"schedule {name}: microbatches={microbatches} on {ranks} ranks: expected {least} or more, "
            f"{family.least} a rank, as its authors do"
        )
    return family
