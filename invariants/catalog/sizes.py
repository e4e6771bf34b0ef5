"""What a step of a case has to move, by the sizes that ranks and the case tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from invariants.catalog.payload import elements, floating
from invariants.catalog.pipelines import pipelines
from invariants.catalog.sharding import elements as covered
from invariants.communication import POINT_TO_POINT, Operation
from invariants.evidence import Evidence, Owned
from invariants.invariant import NotApplicable

SMALL = 16
"""Elements up to which numbers may be a loss, norms, flags or metrics."""
BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Stage:
    """The ranks that differ along `dp` only, and bytes of the parameters that they train."""

    index: int
    ranks: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Line:
    """The ranks along `pp`, and bytes of the activations of one microbatch.

    `pairs`: for a sender and a receiver, how many messages of each microbatch go that way; how many of these are
    gradients that nobody needs, since all before it is frozen; bytes of gradients of a weight that both hold.
    """

    ranks: tuple[int, ...]
    activation: int
    pairs: dict[tuple[int, int], tuple[int, int, int]]


@dataclass(frozen=True)
class Sizes:
    """All of a case. `message` and `parameter`: elements of an activation, and of the smallest trained parameter."""

    stages: tuple[Stage, ...]
    lines: tuple[Line, ...]
    message: int
    parameter: int

    @classmethod
    def of(cls, evidence: Evidence) -> Sizes:
        """From the parameters that ranks hold after the last step, and the sizes of the case."""
        case = evidence.case
        trained = _trained(evidence)
        message = case.microbatch_size * case.model.sequence * case.model.width
        smallest = min((count for rank in trained for count in covered(trained[rank]).values()), default=SMALL + 1)
        lines = (_line(evidence, ranks, message * BYTES[case.precision], trained) for ranks in _along(evidence, "pp"))
        stages = (
            Stage(
                case.topology.coordinate(ranks[0]).get("pp", 0), ranks, sum(piece.bytes for piece in trained[ranks[0]])
            )
            for ranks in _along(evidence, "dp")
        )
        return cls(tuple(stages), tuple(lines), message, smallest)

    def sets_apart(self, operation: Operation) -> bool:
        """Whether it carries no floating point, or 16 elements at most and fewer than what it might be taken for: an
        activation where it is a message, the smallest trained parameter where it is a collective.
        """
        whole = self.message if operation.kind in POINT_TO_POINT else self.parameter
        return not floating(operation) or (elements(operation) <= SMALL and elements(operation) < whole)


def _along(evidence: Evidence, axis: str) -> Iterator[tuple[int, ...]]:
    topology = evidence.case.topology
    found = (topology.peers(axis, rank) for rank in range(topology.world_size))
    return (ranks for rank, ranks in enumerate(found) if ranks[0] == rank)


def _trained(evidence: Evidence) -> dict[int, list[Owned]]:
    """Trained parameters by rank; `LookupError` where a rank told of none at all."""
    held: dict[int, list[Owned]] = {}
    for piece in evidence.optimizer or ():
        if piece.kind == "parameter":
            held.setdefault(piece.rank, []).append(piece)
    return {
        rank: [piece for piece in held[rank] if piece.trainable] for rank in range(evidence.case.topology.world_size)
    }


def _line(evidence: Evidence, ranks: Sequence[int], activation: int, trained: dict[int, list[Owned]]) -> Line:
    crossings: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    needed = False
    for source, target in pairwise(_homes(evidence, ranks)):
        needed = needed or bool(trained[source])
        if source != target:
            crossings[source, target][0] += 1
            crossings[target, source][0] += 1
            crossings[target, source][1] += not needed
    holders: dict[str, list[Owned]] = defaultdict(list)
    for rank in ranks:
        for piece in trained[rank]:
            holders[piece.name].append(piece)
    for name, pieces in holders.items():
        owners = list(dict.fromkeys(piece.rank for piece in pieces))
        if len(owners) > 2:
            raise NotApplicable(f"{name} is trained by {len(owners)} stages: traffic is promised for two at most")
        if len(owners) == 2:
            for piece in pieces:
                other = owners[1 - owners.index(piece.rank)]
                crossings[piece.rank, other][2] += piece.bytes
    return Line(tuple(ranks), activation, {pair: (each[0], each[1], each[2]) for pair, each in crossings.items()})


def _homes(evidence: Evidence, ranks: Sequence[int]) -> Sequence[int]:
    """The rank of each stage: as the recorded schedule places them, else one stage a rank in order."""
    if evidence.schedule is None or len(ranks) == 1:
        return ranks
    placed = next(schedule.placement for peers, schedule in pipelines(evidence) if peers == tuple(ranks))
    return [ranks[int(home)] for home in placed]
