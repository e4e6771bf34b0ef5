"""Loops that numba compiles where it is installed; where it is not, their callers take a way through numpy.

numba is imported when the first loop runs, not before: importing it takes as long as judging a schedule of millions of
actions. Compiled code is kept in numba's cache, beside the source or in the user's cache folder.

Loops that are to be fast index by unsigned numbers: a signed index that is below 0 counts from the end, and to look for
that costs as much as to load.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.util import find_spec
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OFF: Final = "INVARIANTS_NO_NUMBA"
"""Environment variable that, set to anything but the empty string, keeps numba out."""
WORTH_IT: Final = 20_000
"""Computations from which on a program that judges once is faster with numba, measured with 1F1B; importing it takes
about a second."""

_small: ContextVar[bool] = ContextVar("_small", default=False)


def available() -> bool:
    """Whether loops can be compiled here."""
    return not _small.get() and not os.environ.get(OFF) and _installed()


@contextmanager
def only_where_it_pays(actions: int) -> Iterator[None]:
    """Within, numba is left out where there are too few actions to make up for its import."""
    token = _small.set(actions < WORTH_IT and "numba" not in sys.modules)
    try:
        yield
    finally:
        _small.reset(token)


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
