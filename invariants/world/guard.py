"""What no world may do: wait a day, or draw. Hypothesis is kept out of ranks, each of which would shrink by itself."""

from __future__ import annotations

from typing import Any

from invariants.errors import UsageError

LIMIT_S = 86_400.0
"""Deadlines are below a day: what waits longer is not waited for, and backends count in numbers that end somewhere."""


def allowed(seconds: float) -> bool:
    """Whether a call may have this deadline; false of what is no number too."""
    return 0 < seconds < LIMIT_S


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
