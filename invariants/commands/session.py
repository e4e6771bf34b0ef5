"""What the commands share: checks of what users give, worlds that are gone when the command is, exit statuses."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from invariants.errors import UsageError, WorldError
from invariants.registry import registry
from invariants.runner import preloaded
from invariants.target import Fault, HasFaults
from invariants.world.guard import LIMIT_S, allowed

if TYPE_CHECKING:
    from invariants.case import Case
    from invariants.invariant import Invariant
    from invariants.store import Run
    from invariants.target import Target

HOLD, VIOLATED, USAGE, UNKNOWN, NOTHING, INTERRUPTED = 0, 1, 2, 3, 5, 130
"""Exit statuses: all hold; violated; a user's mistake; something could not be judged; nothing was judged; Ctrl-C."""


@dataclass(frozen=True)
class Worlds:
    """How worlds are made: what `--backend`, `--deadline` and `--max-world` say.

    `deadline_s` bounds each call of a world in seconds, `largest` is the most ranks that one may have.
    """

    backend: str = "auto"
    deadline_s: float = 30.0
    largest: int = 8

    def __post_init__(self) -> None:
        if not allowed(self.deadline_s):
            raise UsageError(
                f"--deadline {self.deadline_s:g}: expected a number of seconds above 0 and below {LIMIT_S:g}"
            )
        at_least_one("--max-world", self.largest)
        from invariants.world.pool import Backend

        if self.backend not in get_args(Backend):
            raise UsageError(f"--backend {self.backend}: expected one of {', '.join(get_args(Backend))}")

    def allow(self, case: Case) -> None:
        """Raise `UsageError` where the case wants a larger world."""
        if (size := case.topology.world_size) > self.largest:
            raise UsageError(
                f"case {case}: {size} ranks, --max-world allows {self.largest}: raise it, or name a smaller topology"
            )

    @property
    def options(self) -> str:
        """Those that a replay needs as well: where they are not the defaults."""
        default = Worlds()
        given = {"--backend": (self.backend, default.backend), "--deadline": (self.deadline_s, default.deadline_s)}
        return " ".join(f"{name} {value}" for name, (value, usual) in given.items() if value != usual)

    @contextlib.contextmanager
    def running(self, target: Target, cases: Iterable[Case]) -> Iterator[tuple[Run, Path]]:
        """A function that runs cases of `target`, and a folder for evidence; with the context they are gone.

        Raises `UsageError` where a world as large as the largest of `cases` cannot have the backend.
        """
        from invariants.runner import Runner
        from invariants.world.pool import WorldPool

        with tempfile.TemporaryDirectory(prefix="invariants-") as name:
            folder = Path(name)
            (folder / "scratch").mkdir()
            pool = WorldPool(
                folder, backend=self.backend, deadline_s=self.deadline_s, preload=preloaded(target), owned=True
            )
            try:
                pool.backend(max(case.topology.world_size for case in cases))
                yield Runner(pool, target, folder / "scratch"), folder / "evidence"
            finally:
                try:
                    pool.close()
                except WorldError as error:  # cases are judged by now: this changes no verdict
                    print(f"a rank was killed, as it did not end by itself: {error}", file=sys.stderr)


def registered() -> Mapping[str, Invariant]:
    """All invariants by id, those of the conftest that pytest would read in this folder included."""
    from invariants.project import conftest_invariants

    return registry(conftest_invariants(Path.cwd()))


def at_least_one(option: str, value: int) -> None:
    """Raise `UsageError` for a number below 1."""
    if value < 1:
        raise UsageError(f"{option} {value}: expected 1 or more")


def faults_of(target: Target, wanted: Sequence[str] = ()) -> Mapping[str, Fault]:
    """The target's faults, or those of these names; `UsageError` lists what exists."""
    faults = target.faults() if isinstance(target, HasFaults) else {}
    if not faults:
        raise UsageError(f"target {target.name} has no planted faults; it would return them from a method faults()")
    for name in wanted:
        if name not in faults:
            raise UsageError(
                f"fault {name!r} of target {target.name} does not exist; expected one of {', '.join(faults)}"
            )
    return {name: fault for name, fault in faults.items() if not wanted or name in wanted}


def exit_status(statuses: Iterable[str]) -> int:
    """The exit status that verdicts make together: the gravest counts."""
    found = set(statuses)
    if "violated" in found:
        return VIOLATED
    if "unknown" in found:
        return UNKNOWN
    return HOLD if found & {"holds", "known"} else NOTHING
