"""Evidence of cases on disk, shared by all workers of a session: each case is run by one of them, once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from invariants import codec
from invariants.case import Case
from invariants.errors import WorldError
from invariants.evidence import Evidence

Run = Callable[[Case, "str | None"], Evidence]
"""Runs a case, with a planted fault by name or None, and returns what was recorded."""

WAIT_S = 600.0
"""Longest wait for another worker's run of one case, in seconds: several worlds with their deadlines fit in."""


class Store:
    """A folder with one file of evidence for each case and fault that was run.

    A worker claims a case by a lock that the system releases when the worker dies, so that no claim outlives its
    worker. A file appears under its name by a rename: it is whole, or not there.
    """

    def __init__(self, folder: Path, wait_s: float = WAIT_S) -> None:
        """Make the folder if there is none; all workers name the same one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.wait_s = wait_s

    def fetch(
        self, case: Case, fault: str | None, run: Run, *, purpose: str = "plan", wait: bool = True
    ) -> Evidence | None:
        """The stored evidence; else that of `run`, which is then stored.

        While another worker runs the case, return None, or with `wait` its evidence once there is one. After `wait_s`
        seconds that raises `WorldError`. What `run` raises goes through, and leaves the case unclaimed.
        """
        if stored := self.peek(case, fault):
            return stored
        path = self._path(case, fault)
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=self.wait_s if wait else 0)
        except Timeout:
            if not wait:
                return None
            raise WorldError(
                f"case {case}, fault {fault or 'none'}: another worker has been running it for {self.wait_s:g} s and "
                f"has not written {path}; end that worker, or give the case a shorter deadline"
            ) from None
        try:
            return self.peek(case, fault) or self._run(case, fault, run, purpose)
        finally:
            lock.release()

    def peek(self, case: Case, fault: str | None) -> Evidence | None:
        """The stored evidence, or None; never waits, never runs."""
        try:
            text = self._path(case, fault).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return codec.loads(text)

    def runs(self) -> tuple[str, ...]:
        """One line for each run that was made to its end, by whatever worker: its purpose, fault and case."""
        try:
            return tuple(self._log.read_text(encoding="utf-8").splitlines())
        except FileNotFoundError:
            return ()

    @property
    def _log(self) -> Path:
        return self.folder / "runs.txt"

    def _path(self, case: Case, fault: str | None) -> Path:
        key = hashlib.sha256(json.dumps([str(case), fault]).encode()).hexdigest()[:32]
        return self.folder / f"{key}.json"

    def _run(self, case: Case, fault: str | None, run: Run, purpose: str) -> Evidence:
        evidence = run(case, fault)
        # One write in append mode: lines of several workers do not mix.
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"{purpose} {fault or '-'} {case}\n")
        path = self._path(case, fault)
        # The lock is held, so the name is this worker's alone; what a dead one left under it is overwritten.
        part = path.with_suffix(".part")
        part.write_text(codec.dumps(evidence), encoding="utf-8")
        part.replace(path)
        return evidence
