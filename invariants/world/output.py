"""What ranks print: the end of it for reports, all of it for who wants to read along."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from invariants.world.notices import NOTICES, Levels, Notice, Notices, levels

TAIL = 10_000
"""Bytes of each stream that a report shows."""
STREAMS = {"stdout": "out", "stderr": "err"}
LOOK_S = 0.05
"""How long a line may wait until who reads along sees it."""


@dataclass(frozen=True)
class Output:
    """The end of what a rank wrote to one of its streams since the world's last reset."""

    rank: int
    size: int
    stream: str
    text: str

    @property
    def title(self) -> str:
        """Of its section in a report."""
        return f"Captured {self.stream} of rank {self.rank} (world of {self.size})"


def outputs(folder: Path, size: int, ranks: Iterable[int]) -> tuple[Output, ...]:
    """What `ranks` of a world of `size` wrote, where they wrote something."""
    texts = ((rank, stream, _tail(folder / f"{rank}.{suffix}")) for rank in ranks for stream, suffix in STREAMS.items())
    return tuple(Output(rank, size, stream, text) for rank, stream, text in texts if text)


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        cut = max(0, file.seek(0, 2) - TAIL)
        file.seek(cut)
        text = file.read().decode(errors="replace")
    if not cut:
        return text
    # From the first whole line on, if there is one.
    broken = text.find("\n") + 1
    shown = text[broken:] or text
    return f"(... {cut + len(text[:broken].encode()):,} bytes before this are not shown)\n{shown}"


class Listener:
    """What the ranks of one world print, warn of and log, for their controller.

    `relay`: hand warnings and log records on to this process's own. `live`: copy what is printed, while it is.
    """

    def __init__(self, folder: Path, size: int, *, relay: bool, live: bool) -> None:
        self._folder = folder
        self._size = size
        self._notices = Notices(folder, size) if relay else None
        self._live = Live(folder, size) if live else None

    def levels(self) -> Levels:
        """The levels that loggers of ranks are to have."""
        return {} if self._notices is None else levels()

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """While the ranks are at work."""
        return contextlib.nullcontext() if self._live is None else self._live.shown()

    def outputs(self, ranks: Iterable[int] | None = None) -> tuple[Output, ...]:
        """What `ranks` wrote since the last `forget`, by default all."""
        return outputs(self._folder, self._size, range(self._size) if ranks is None else ranks)

    def take(self) -> list[Notice]:
        """Warnings and log records that were not taken before."""
        return [] if self._notices is None else self._notices.take()

    def hand_on(self, notices: list[Notice]) -> None:
        """Log and warn in this process; raises a warning that its filters make an error."""
        if notices and self._notices is not None:
            self._notices.hand_on(notices)

    def forget(self) -> None:
        """Empty the files."""
        if self._live is not None:
            self._live.begin_anew()
        if self._notices is not None:
            self._notices.begin_anew()
        for suffix in (*STREAMS.values(), NOTICES):
            for file in self._folder.glob(f"*.{suffix}"):
                os.truncate(file, 0)


class Live:
    """Copies what the ranks of a world write to this process's own streams, each line behind its rank."""

    def __init__(self, folder: Path, size: int) -> None:
        self._read = {(rank, stream): 0 for rank in range(size) for stream in STREAMS}
        self._folder = folder
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Copy while the ranks are at work."""
        done = threading.Event()

        def follow() -> None:
            while not done.wait(LOOK_S):
                self.copy()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.copy(to_end=True)

    def copy(self, *, to_end: bool = False) -> None:
        """Copy the lines that are new; at the end of a call also one that is not whole."""
        with self._lock:
            for (rank, stream), start in self._read.items():
                path = self._folder / f"{rank}.{STREAMS[stream]}"
                if not path.exists() or path.stat().st_size <= start:
                    continue
                with path.open("rb") as file:
                    file.seek(start)
                    new = file.read()
                if not to_end:
                    new = new[: new.rfind(b"\n") + 1]
                self._read[rank, stream] = start + len(new)
                _write(getattr(sys, stream), rank, new.decode(errors="replace"))

    def begin_anew(self) -> None:
        """The files are about to be emptied."""
        self.copy(to_end=True)
        self._read = dict.fromkeys(self._read, 0)


def _write(stream: TextIO, rank: int, text: str) -> None:
    stream.write("".join(f"[rank {rank}] {line}\n" for line in text.removesuffix("\n").split("\n")))
    stream.flush()
