"""Keeps Hypothesis out of the ranks: each would draw, and shrink, examples of its own."""

from __future__ import annotations

from typing import Any

from invariants.errors import UsageError


def refuse_given(size: int) -> None:
    """Make entering `@given` an error in this process, if it is one rank of several."""
    if size == 1:
        return
    from hypothesis import core

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise UsageError(refusal(size))

    # The first step of every test that `given` wraps.
    setattr(core, "process_arguments_to_given", refuse)  # noqa: B010 (mypy knows its signature)


def refusal(size: int) -> str:
    """Why a drawing rank is an error, and what to do instead."""
    return (
        f"@given was entered on one of {size} ranks: each rank would draw examples of its own; "
        "draw in the test and hand the drawn values to world.run"
    )
