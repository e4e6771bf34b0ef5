"""The hooks that this plugin adds to pytest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from invariants.errors import UsageError
from invariants.registry import checked

if TYPE_CHECKING:
    from pluggy import HookCaller

    from invariants.invariant import Invariant


@pytest.hookspec
def pytest_invariants_register(config: pytest.Config) -> Iterable[Invariant]:  # type: ignore[empty-body]
    """Return invariants of a project's own, made by `@invariants.invariant`.

    A conftest implements it; they are then judged beside the built-in ones by every suite below its folder.
    """


def registered(hook: HookCaller, config: pytest.Config) -> tuple[Invariant, ...]:
    """What the implementations of `pytest_invariants_register` return; `UsageError` names what is none."""
    names = ", ".join(implementation.plugin_name for implementation in hook.get_hookimpls())
    source = f"pytest_invariants_register of {names}"
    found: list[Invariant] = []
    for declared in hook(config=config):
        if not isinstance(declared, Iterable):
            raise UsageError(f"{source}: {declared!r}: expected a list of invariants")
        found.extend(checked(tuple(declared), source))
    return tuple(found)
