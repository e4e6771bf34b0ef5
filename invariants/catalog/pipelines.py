"""The pipelines of a recorded schedule: one for each replica, with its rows in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from invariants.case import Case
from invariants.errors import UsageError
from invariants.evidence import Evidence
from invariants.schedule.actions import parse_rows
from invariants.schedule.families import FAMILIES, checked
from invariants.schedule.table import Schedule


def pipelines(evidence: Evidence) -> Iterator[tuple[tuple[int, ...], Schedule]]:
    """Yield the ranks along `pp` and their schedule, once for each position on the other axes."""
    if evidence.schedule is None:
        raise LookupError("section schedule was not recorded")
    topology = evidence.case.topology
    for rank in range(topology.world_size):
        peers = topology.peers("pp", rank)
        if peers[0] == rank:
            yield peers, Schedule.of_rows(parse_rows([evidence.schedule[peer] for peer in peers]))


def no_family(case: Case) -> str | None:
    """None where the case's schedule is a family that exists at its sizes and so has closed forms, else why not."""
    if case.schedule not in FAMILIES:
        return f"schedule {case.schedule!r} has no closed form here"
    try:
        checked(case.schedule, case.topology.size("pp"), case.microbatches)
    except UsageError as error:
        return str(error)
    return None


def stages_a_rank(name: str, schedule: Schedule) -> int:
    """What `generate` is told of the stages a rank: as many as were recorded, where the family leaves that open."""
    return 1 if FAMILIES[name].virtual else max(1, schedule.stages // schedule.ranks)


def least_stages(name: str, schedule: Schedule) -> int:
    """Stages that a schedule has to have: those that occur, and in a family as many on each rank, else one."""
    occur = max(schedule.stages, schedule.ranks)
    if name not in FAMILIES:
        return occur
    return max(occur, schedule.ranks * (FAMILIES[name].virtual or -(-occur // schedule.ranks)))


def first_trained_stage(evidence: Evidence) -> int:
    """Frozen first stages get no gradient. Which ones are, ranks tell; without their word, the case's split does."""
    topology = evidence.case.topology
    held = {(seen.rank, seen.trainable) for seen in evidence.optimizer or () if seen.kind == "parameter"}
    if held:
        trained = {topology.coordinate(rank).get("pp", 0) for rank, trainable in held if trainable}
        return min(trained, default=0)
    split, frozen = evidence.case.split, set(evidence.case.frozen)
    if split is None:
        return 0
    layer = 0
    for stage, count in enumerate(split):
        if not set(range(layer, layer + count)) <= frozen:
            return stage
        layer += count
    return 0
