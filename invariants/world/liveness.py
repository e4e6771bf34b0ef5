"""Proves a deadlock from the records of ranks: who waits for whom, and that none of them can go on.

An operation completes once its other side has been posted: of a message its partner, of a collective the same one on
every member. A rank that does not wait may still post. So: the ranks that do not wait can go on, and so can each that
waits for what has been posted or may still be; repeat. Whoever is left waits for ever. Ranks that have finished or
died post nothing more. What is read at different times is one state: a rank that waits in the same operation before
and after all others were read has waited all along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from invariants.communication import ANY_SOURCE, NEW_GROUP, POINT_TO_POINT, SEND, Operation
from invariants.world.record import Reader, State, answering, opening


@dataclass(frozen=True)
class Stuck:
    """A rank that waits for ever, in `operation`, for something that each of `blockers` would have to do."""

    operation: Operation
    blockers: tuple[int, ...]


def stuck_ranks(states: Mapping[int, State], done: frozenset[int], busy: frozenset[int]) -> dict[int, Stuck]:
    """Which ranks wait for ever.

    `states`: of each rank of the world; `done`: those that have finished or died; `busy`: those of which another thread
    than the main one may still communicate. What is lost of a record may be anything.
    """
    unknown = busy | {rank for rank, state in states.items() if state.lost}
    going = unknown | {
        rank
        for rank, state in states.items()
        if rank not in done and (state.waiting is None or _unclear(state, states))
    }
    left = {rank: state.waiting for rank, state in states.items() if rank not in going and rank not in done}
    while True:
        blocked = {
            rank: tuple(_blockers(operation, states, going, unknown))
            for rank, operation in left.items()
            if operation is not None
        }
        freed = {rank for rank, blockers in blocked.items() if not blockers}
        if not freed:
            return {rank: Stuck(operation, blocked[rank]) for rank, operation in left.items() if operation is not None}
        going = going | freed
        left = {rank: operation for rank, operation in left.items() if rank not in freed}


def _blockers(
    operation: Operation, states: Mapping[int, State], going: frozenset[int], unknown: frozenset[int]
) -> Iterator[int]:
    """The ranks that have not posted what the operation needs of them, and never will."""
    sequence = answering(operation) if operation.kind in POINT_TO_POINT else operation.sequence
    for peer in _needed(operation):
        counts = states[peer].counts
        if counts.get(sequence, 0) < operation.turn:
            if peer not in going:
                yield peer
        elif operation.kind == NEW_GROUP and peer not in unknown and opening(operation) not in counts:
            yield peer  # it has opened another group in the place of this one
        elif peer not in unknown and _differ(operation, states[peer].waiting):
            yield peer


def _needed(operation: Operation) -> tuple[int, ...]:
    """The ranks without which the operation cannot complete.

    What goes out from a root needs the root, and what comes to a root is complete there when all have given theirs. The
    other ends may be done before the rest has joined: backends differ.
    """
    root = operation.peer
    if operation.kind in POINT_TO_POINT:
        return (root,)
    if operation.kind in ("broadcast", "scatter"):
        return () if operation.rank == root else (root,)
    if operation.kind in ("reduce", "gather"):
        return operation.members if operation.rank == root else ()
    return operation.members


def _differ(operation: Operation, other: Operation | None) -> bool:
    """Whether two collectives that wait in the same place of their group are not the same, and so do not meet.

    Kinds that tensors alone tell apart, as `all_gather` and `all_gather_into_tensor`, may.
    """
    if other is None or (operation.sequence, operation.turn) != (other.sequence, other.turn):
        return False
    return operation.kind.split("_")[:2] != other.kind.split("_")[:2]


def _unclear(state: State, states: Mapping[int, State]) -> bool:
    """Whether the operation waits for one of several, or for a partner that the record cannot name."""
    operation = state.waiting
    if operation is None or operation.kind == ANY_SOURCE:
        return True
    if operation.kind not in POINT_TO_POINT:
        return operation.turn == 0 or not set(operation.members) <= set(states)
    if operation.peer not in states:
        return True
    # A receive from any source may take what another one seems to wait for.
    receiver = operation.peer if operation.kind == SEND else operation.rank
    return any(key[2] == ANY_SOURCE and key[0] == operation.group for key in states[receiver].counts)


def cycle(stuck: Mapping[int, Stuck]) -> tuple[int, ...]:
    """Ranks that wait for each other in a ring, the smallest first; empty where all wait for one that is done."""
    for start in sorted(stuck):
        path = [start]
        while (after := next((peer for peer in stuck[path[-1]].blockers if peer in stuck), None)) is not None:
            if after in path:
                ring = path[path.index(after) :]
                first = ring.index(min(ring))
                return tuple(ring[first:] + ring[:first])
            path.append(after)
    return ()


class Watch:
    """Looks again and again at the records of a world's ranks while a call is on its way.

    `runs` tells whether a thread of a rank, by its native id, still does.
    """

    def __init__(self, folder: Path, size: int, runs: Callable[[int, int], bool]) -> None:
        paths = {rank: folder / f"{rank}.record" for rank in range(size)}
        self._readers = {rank: Reader(path, rank) for rank, path in paths.items() if path.exists()}
        self._size = size
        self._runs = runs
        self._before: dict[int, int] = {}

    def close(self) -> None:
        """Unmap the records."""
        for reader in self._readers.values():
            reader.close()

    def look(self, done: frozenset[int]) -> dict[int, Stuck]:
        """The ranks that wait for ever, if that was so at the last look too and they have not moved since."""
        before, self._before = self._before, {}
        if len(self._readers) < self._size:
            return {}
        pulses = {rank: reader.pulse() for rank, reader in self._readers.items()}
        if not any(waiting for rank, (_, waiting) in pulses.items() if rank not in done):
            return {}
        states = {rank: reader.state() for rank, reader in self._readers.items()}
        read = {rank: state for rank, state in states.items() if state is not None}
        if len(read) < len(states):
            return {}
        stuck = stuck_ranks(read, done, frozenset(rank for rank, state in read.items() if self._threads(rank, state)))
        self._before = {rank: read[rank].turns for rank in stuck}
        if stuck and self._before.items() <= before.items():
            return stuck
        return {}

    def operations(self, rank: int, last: int | None = None) -> list[Operation]:
        """What a rank has communicated, or the `last` of it; nothing where it left no record."""
        reader = self._readers.get(rank)
        return [] if reader is None else reader.operations(last)

    def _threads(self, rank: int, state: State) -> bool:
        return any(self._runs(rank, thread) for thread in state.threads)


def sentences(stuck: Mapping[int, Stuck], done: frozenset[int]) -> Iterator[str]:
    """One a rank: what it waits in, and for whom."""
    for rank in sorted(stuck):
        operation, blockers = stuck[rank].operation, stuck[rank].blockers
        parts = [f"rank {rank} waits in {operation}"]
        if gone := [peer for peer in blockers if peer in done]:
            parts.append(f"{_names(gone)} {'has' if len(gone) == 1 else 'have'} finished without it")
        late = [peer for peer in blockers if peer not in done]
        if late and operation.kind not in POINT_TO_POINT:
            parts.append(f"{_names(late)} {'has' if len(late) == 1 else 'have'} not joined")
        yield "; ".join(parts)


def _names(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
