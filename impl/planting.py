"""How a fault or a variant is put into `impl` from outside: nothing in there knows of them.

A patch replaces functions, at the place where they are looked up, with what `plants`, `misplaced`, `miscommunicated`
and `variants` make of the originals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

from impl.conditions import Applies
from impl.plants import Make
from invariants.target import Fault


@contextmanager
def patched(changes: Mapping[str, Make]) -> Iterator[None]:
    """Replace what `module.attribute` or `module.Class.attribute` of `impl` names, and put the originals back."""
    with ExitStack() as stack:
        for path, make in changes.items():
            module, *owners, name = path.split(".")
            owner: Any = import_module(f"impl.{module}")
            for part in owners:
                owner = getattr(owner, part)
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))
        yield


def fault(report: str, applies: Applies, changes: Mapping[str, Make]) -> Fault:
    """A wrong line that stands for `report`."""
    return Fault(report, lambda: patched(changes), applies=applies)


def harmless(reason: str, applies: Applies, changes: Mapping[str, Make]) -> Fault:
    """A change that keeps every promise."""
    return Fault(reason, lambda: patched(changes), harmless=True, applies=applies)
