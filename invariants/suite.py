"""`suite`: a test function for pytest that judges a target, one item an invariant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from invariants.suite_plugin import Outcome
    from invariants.target import Target

ATTRIBUTE = "invariants_suite"


@dataclass(frozen=True)
class Suite:
    """What a test module asked for; checked when pytest collects it."""

    target: Target
    cases: int | None = None
    seed: int | None = None
    known: tuple[Path | str, ...] = ()


def suite(
    target: Target, *, cases: int | None = None, seed: int | None = None, known: Sequence[Path | str] = ()
) -> Callable[..., None]:
    """Make the test function that judges `target`: assign it to a name that pytest collects.

    It becomes one item per invariant, `test_mine[replicas.agree]`. `cases` is the number of cases to draw, by default
    the loaded Hypothesis profile's; `seed` what to draw them from, by default 0, and a new one each session under the
    random profiles; `known` are files of known violations, relative to the test module. `--invariants-cases`,
    `--invariants-seed` and `--case` on pytest's command line take precedence. What is wrong with the arguments is an
    error of the collection.
    """

    def judge(invariants_outcome: Outcome) -> None:
        """Passes where the invariant holds."""
        invariants_outcome.tell()

    setattr(judge, ATTRIBUTE, Suite(target, cases, seed, tuple(known)))
    # pytest asks a function for it, and then shows the line of the assignment instead of the one above.
    caller = sys._getframe(1)
    judge.place_as = SimpleNamespace(__code__=caller.f_code.replace(co_firstlineno=caller.f_lineno))  # type: ignore[attr-defined]
    return judge
