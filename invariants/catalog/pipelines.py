"""The pipelines of a recorded schedule: one for each replica, with its rows in stage order."""

from __future__ import annotations

from collections.abc import Iterator

from invariants.evidence import Evidence
from invariants.schedule.actions import parse_rows
from invariants.schedule.table import Schedule

FAMILIES = ("gpipe", "1f1b")


def pipelines(evidence: Evidence) -> Iterator[tuple[tuple[int, ...], Schedule]]:
    """Yield the ranks along `pp` and their schedule, once for each position on the other axes."""
    if evidence.schedule is None:
        raise LookupError("section schedule was not recorded")
    topology = evidence.case.topology
    for rank in range(topology.world_size):
        peers = topology.peers("pp", rank)
        if peers[0] == rank:
            yield peers, Schedule.of_rows(parse_rows([evidence.schedule[peer] for peer in peers]))


def known_family(name: str) -> str | None:
    """None where the schedule has closed forms, else the reason why not."""
    return None if name in FAMILIES else f"schedule {name!r} has no closed form here"
