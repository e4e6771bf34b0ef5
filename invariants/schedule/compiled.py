"""Loops that numba compiles where it is installed; where it is not, their callers take a way through numpy.

numba is imported when the first loop runs, not before: importing it takes as long as judging a schedule of millions of
actions. Compiled code is kept in numba's cache, beside the source or in the user's cache folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OFF: Final = "INVARIANTS_NO_NUMBA"
"""Environment variable that, set to anything but the empty string, keeps numba out."""


def available() -> bool:
    """Whether loops can be compiled here."""
    return not os.environ.get(OFF) and _installed()


@cache
def _installed() -> bool:
    return find_spec("numba") is not None


def loop(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of arrays and numbers that is compiled at its first call; callers ask `available()` first.

    It may call other functions only where they are plain numpy.
    """

    @cache
    def ready() -> Callable[P, R]:
        import numba

        made: Callable[P, R] = numba.njit(cache=True, nogil=True)(function)
        return made

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return ready()(*args, **kwargs)

    return call
