"""Whether a schedule does everything once, in an order in which each result exists before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from invariants.schedule.actions import Row
from invariants.schedule.inventory import PARTNERS, Inventory
from invariants.schedule.table import RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, Schedule, W

MOST: Final = 100
"""Sentences about one kind of problem that are written out; a last one counts the others."""


def complete(schedule: Schedule | Sequence[Row], stages: int, microbatches: int, first_trained: int = 0) -> list[str]:
    """What is wrong with a schedule, or with rows, one a rank: a sentence a problem; empty where nothing is.

    `missing` and `misordered` together.
    """
    found = Inventory.of(schedule, stages, microbatches)
    return [*missing(found, first_trained), *misordered(found, first_trained)]


def missing(found: Inventory, first_trained: int = 0) -> list[str]:
    """What is not there, or more than once, or where it should not be.

    Each stage computes on one rank. Each (stage, microbatch) has one forward and one backward B, or one input gradient
    I and one weight gradient W. Nothing is out of range or done twice. Where the schedule communicates, each send has
    its receive, and whatever crosses ranks is exchanged. Stages before `first_trained` hold no trained parameter: no
    gradient need reach them, though one may.
    """
    if found.flawless:
        return []
    kinds = [found.out_of_range(), found.repeated(), found.astray(), found.computations()]
    if found.schedule.communicates:
        kinds += [found.unreceived(RECV_F, 0), found.unreceived(RECV_B, first_trained)]
        kinds += [found.unpaired(code) for code in PARTNERS]
    return [sentence for kind in kinds for sentence in shortened(kind)]


def misordered(found: Inventory, first_trained: int = 0) -> list[str]:
    """What is used before it exists, on one rank: B and I come after F, and W after I; a computation after those of its
    rank whose result it needs, and after the receive of what it needs; a send after what made its message.

    The order between ranks is left to the data, and to the transport (`order.evaluate`).
    """
    if found.flawless or not found.stages:
        return []
    table, gradient = found.first, found.gradient
    pairs = [(table[F], table[B]), (table[F], table[I]), (table[I], table[W])]
    pairs += [(table[F], table[SEND_F]), (table[RECV_F], table[F])]
    pairs += [(gradient, table[SEND_B]), (table[RECV_B], gradient)]
    near = found.home[:-1] == found.home[1:]
    pairs += [(table[F][:-1][near], table[F][1:][near])]
    near[:first_trained] = False
    pairs += [(gradient[1:][near], gradient[:-1][near])]
    return [sentence for earlier, later in pairs for sentence in shortened(found.late(earlier, later))]


def shortened(sentences: Iterator[str]) -> Iterator[str]:
    """The first `MOST` of them, and how many others there are."""
    yield from islice(sentences, MOST)
    if others := sum(1 for _ in sentences):
        yield f"and {others} more like it"
