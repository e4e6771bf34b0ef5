"""Signs of life on standard error: a bar where it is a terminal, else a line every few seconds."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from invariants.case import Case
    from invariants.evidence import Evidence
    from invariants.store import Run


class Progress:
    """A context in which `console` shows what goes on; `runs` that were begun and `seconds` count from its making.

    A log gets a line each `every_s` seconds, by a thread: a single case may take longer than that.
    """

    def __init__(self, console: Console, title: str, *, every_s: float = 5.0) -> None:
        self.runs = 0
        self._console = console
        self._title = title
        self._every_s = every_s
        self._started = time.monotonic()
        self._done, self._total = 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._bar = Bar(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        else:
            self._console.print(self._title)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._console.is_terminal:
            self._bar.stop()
        else:
            self._thread.join()

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self._started

    def count(self, done: int, total: int) -> None:
        """Tell how much of the work is done."""
        self._done, self._total = done, total
        self._bar.update(self._task, completed=done, total=total)

    def say(self, title: str) -> None:
        """Tell what the work is, from now on."""
        self._title = title
        self._bar.update(self._task, description=title)

    def counting(self, run: Run) -> Run:
        """The same `run`, each call of which is counted."""

        def counted(case: Case, fault: str | None = None) -> Evidence:
            self.runs += 1
            return run(case, fault)

        return counted

    def _tell(self) -> None:
        while not self._ended.wait(self._every_s):
            share = f"{self._done} of {self._total}, " if self._total else ""
            self._console.print(f"{self._title}: {share}run {self.runs}, {self.seconds:.0f} s")
