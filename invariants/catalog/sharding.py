"""Which ranks of a stage hold which elements of optimizer state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from invariants.evidence import Evidence, Owned


@dataclass(frozen=True)
class Stage:
    """The ranks that differ along `dp` only, `trained` parameters and optimizer `state` with masters, without padding.

    `idle` parameters are trainable, get no gradient in any step and have no state on any of the ranks: torch makes
    state lazily, at the first update by a gradient. They are not among the trained ones. `sizes` are bytes of state of
    each rank, padding included; step counters are no part of anything here.
    """

    index: int
    ranks: tuple[int, ...]
    trained: tuple[Owned, ...]
    idle: tuple[Owned, ...]
    state: tuple[Owned, ...]
    sizes: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """State keys that any of the ranks holds, in alphabetical order."""
        return tuple(sorted({key_of(piece) for piece in self.state}))


@dataclass(frozen=True)
class Segment:
    """Elements `lo..hi-1` of one tensor of state that no rank holds, or several, or one though they are not trained."""

    name: str
    key: str
    lo: int
    hi: int
    trained: bool
    holders: tuple[int, ...]


def stages(evidence: Evidence) -> Iterator[Stage]:
    """Every stage, once for each position on axes other than `dp`."""
    topology = evidence.case.topology
    pieces = [piece for piece in evidence.optimizer or () if piece.role != "counter"]
    seen = {seen.name for seen in evidence.gradients or () if not seen.missing}

    def with_gradient(name: str) -> bool:
        return name in seen or not evidence.gradients

    for first in range(topology.world_size):
        ranks = topology.peers("dp", first)
        if ranks[0] != first:
            continue
        own = [piece for piece in pieces if piece.rank in ranks]
        state = [piece for piece in own if piece.kind != "parameter"]
        trainable = [piece for piece in own if piece.kind == "parameter" and piece.trainable]
        held = {piece.name for piece in state if piece.lo < piece.hi}
        yield Stage(
            index=topology.coordinate(first).get("pp", 0),
            ranks=ranks,
            trained=tuple(piece for piece in trainable if piece.name in held or with_gradient(piece.name)),
            idle=tuple(piece for piece in trainable if piece.name not in held and not with_gradient(piece.name)),
            state=tuple(piece for piece in state if piece.role == "value"),
            sizes=tuple(sum(piece.bytes for piece in state if piece.rank == rank) for rank in ranks),
        )


def key_of(piece: Owned) -> str:
    """The state key, `master` for master copies."""
    return piece.state_key or piece.kind


def elements(pieces: Iterable[Owned]) -> dict[str, int]:
    """Number of distinct elements that the pieces cover, by name."""
    covered: dict[str, int] = defaultdict(int)
    reached: dict[str, int] = defaultdict(int)
    for piece in sorted(pieces, key=lambda piece: piece.lo):
        covered[piece.name] += max(0, piece.hi - max(piece.lo, reached[piece.name]))
        reached[piece.name] = max(piece.hi, reached[piece.name])
    return covered


def misplaced(trained: Sequence[Owned], state: Sequence[Owned], keys: Sequence[str]) -> Iterator[Segment]:
    """What is not held exactly once where it is trained, and not at all where it is not, by name and state key."""
    for name in dict.fromkeys(piece.name for piece in (*trained, *state)):
        whole = [piece for piece in trained if piece.name == name]
        for key in keys:
            pieces = [piece for piece in state if piece.name == name and key_of(piece) == key]
            edges = sorted({edge for piece in (*whole, *pieces) for edge in (piece.lo, piece.hi)})
            for lo, hi in pairwise(edges):
                wanted = any(piece.lo <= lo < piece.hi for piece in whole)
                holders = tuple(sorted(piece.rank for piece in pieces if piece.lo <= lo < piece.hi))
                if len(holders) != wanted:
                    yield Segment(name, key, lo, hi, wanted, holders)
