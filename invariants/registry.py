"""Which invariants exist: the built-in ones, those of installed packages, those of a project's conftest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points

from invariants.errors import UsageError
from invariants.invariant import Invariant

GROUP = "invariants"
"""Entry point group: each entry names an `Invariant`, or a sequence of them."""


def built_in() -> tuple[Invariant, ...]:
    """The invariants that this package ships, in the order in which they are shown."""
    from invariants.catalog import BUILT_IN

    return BUILT_IN


def installed() -> tuple[Invariant, ...]:
    """Invariants of third-party packages, by entry point."""
    found: list[Invariant] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            loaded = entry.load()
        except Exception as error:
            raise UsageError(
                f"entry point {entry.name} = {entry.value} of group {GROUP!r} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        found.extend(checked(loaded, f"entry point {entry.name} = {entry.value}"))
    return tuple(found)


def checked(declared: object, source: str) -> tuple[Invariant, ...]:
    """Take an invariant or a sequence of them from `source`, or refuse with what would be right."""
    items = tuple(declared) if isinstance(declared, (list, tuple)) else (declared,)
    for item in items:
        if not isinstance(item, Invariant):
            raise UsageError(
                f"{source}: {item!r} is not an invariant; decorate its function with @invariants.invariant"
            )
    return items


def registry(extra: Iterable[Invariant] = ()) -> Mapping[str, Invariant]:
    """All invariants by id: built-in, installed, then `extra`; two of one id are refused."""
    found: dict[str, Invariant] = {}
    for item in (*built_in(), *installed(), *extra):
        if item.id in found and found[item.id] is not item:
            raise UsageError(f"invariant {item.id!r} is declared twice; give one of them another id")
        found[item.id] = item
    return found


def select(invariants: Mapping[str, Invariant], wanted: Iterable[str]) -> tuple[Invariant, ...]:
    """The invariants of these ids, all of them where `wanted` is empty; an unknown id is refused."""
    ids = list(wanted)
    for name in ids:
        if name not in invariants:
            raise UsageError(f"invariant {name!r} does not exist; expected one of {', '.join(invariants)}")
    return tuple(invariants[name] for name in ids) if ids else tuple(invariants.values())
