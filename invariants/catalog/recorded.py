"""What must have been recorded before an invariant can say that it holds."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def demand(what: str, wanted: Iterable[object], recorded: Container[object]) -> None:
    """Raise `LookupError` where something that is to be judged was not recorded: the verdict is then `unknown`."""
    for each in wanted:
        if each not in recorded:
            raise LookupError(f"{what} {each}: nothing was recorded")


def ranks_and_steps(ranks: int, first: int, last: int) -> list[tuple[int, int]]:
    """(rank, step) of all ranks for steps `first` to `last`, by step."""
    return [(rank, step) for step in range(first, last + 1) for rank in range(ranks)]


def something(what: str, recorded: Sequence[T] | None) -> Sequence[T]:
    """What was recorded; `LookupError` where that is nothing at all."""
    if not recorded:
        raise LookupError(f"{what}: nothing was recorded")
    return recorded
