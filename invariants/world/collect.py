"""Waiting for all ranks of a call at once: who answered, who failed, who is stuck, and where."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from invariants.communication import Operation
from invariants.contract import disagreements, unpaired
from invariants.world import liveness
from invariants.world.failure import RankFailure
from invariants.world.starter import Starter
from invariants.world.wire import FrameReader, send_frame

GRACE_S = 1.0
"""How long the other ranks may take to report what followed from the first failure."""
DUMP_S = 2.0
"""How long the ranks may take to write their Python stacks."""
LOOK_S = 0.1
"""How often the records of the ranks are looked at; a deadlock shows at the second look after it."""
LAST = 10
"""Operations of each rank that a failure shows, each once where it repeats itself."""
SHOWN = 500
"""Operations that are looked at for that."""
COMPARED = 2000
"""Operations of each rank that are held against those of the others."""
MISMATCHES = 3
"""Places where ranks disagree that a failure shows."""
TAIL = 4000
"""Bytes of a dead rank's standard error that a failure shows."""


class Rank:
    """A rank process and the controller's end of its socket."""

    def __init__(self, number: int, pid: int, sock: socket.socket) -> None:
        self.number = number
        self.pid = pid
        self.sock = sock
        self.reader = FrameReader(sock)

    def send(self, command: bytes, limit_s: float) -> None:
        """Send a command; that the rank cannot take it shows when its answer is waited for."""
        self.sock.settimeout(limit_s)
        with contextlib.suppress(OSError):
            send_frame(self.sock, command)

    def stderr(self, folder: Path) -> str:
        """The end of what the rank wrote to its standard error."""
        with (folder / f"{self.number}.err").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            return file.read().decode(errors="replace")


class Collection:
    """The answers to one command. `failures` are in the order of arrival; `unfinished` ranks are to be killed."""

    def __init__(self, ranks: Sequence[Rank], server: Starter, folder: Path, limit_s: float) -> None:
        self.failures: list[RankFailure] = []
        self.mismatches: tuple[str, ...] = ()
        self._ranks = ranks
        self._server = server
        self._folder = folder
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._answers: dict[int, bytes] = {}
        self._failed: set[int] = set()
        self._watch: liveness.Watch | None = None

    @property
    def unfinished(self) -> tuple[Rank, ...]:
        """Ranks that are still at work, or wait for ever."""
        stuck = {failure.rank for failure in self.failures if failure.kind == "deadlock"}
        return tuple(rank for rank in self._ranks if rank.number in stuck or not self._done(rank))

    @property
    def _pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def collect(self) -> list[bytes] | None:
        """Wait; the answers in rank order, or None if a rank failed."""
        try:
            return self._collect()
        finally:
            if self._watch is not None:
                self._watch.close()

    def _collect(self) -> list[bytes] | None:
        until = self._began + self._limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.sock, selectors.EVENT_READ, None)
            for rank in self._ranks:
                selector.register(rank.sock, selectors.EVENT_READ, rank)
            while not all(map(self._done, self._ranks)) and (remaining := until - time.monotonic()) > 0:
                healthy = not self.failures
                ready = selector.select(min(remaining, LOOK_S))
                if not ready and healthy and self._deadlocked():
                    break
                for key, _ in ready:
                    if key.data is None:
                        self._server.note_exit()
                    elif not self._take(key.data):
                        selector.unregister(key.fileobj)
                self._bury()
                if healthy and self.failures:
                    until = min(until, time.monotonic() + GRACE_S)
        if not self.failures and len(self._answers) == len(self._ranks):
            return [self._answers[rank.number] for rank in self._ranks]
        self._dump_unfinished()
        self._server.refresh(self._pids, moving=True)
        watch = self._watching()
        records = {rank.number: watch.operations(rank.number, COMPARED) for rank in self._ranks}
        self.mismatches = _mismatches(records)
        self.failures = [
            replace(failure, operations=_last(records[failure.rank][-SHOWN:])) for failure in self.failures
        ]
        # Who does not communicate keeps those waiting that do.
        waiting = {number for number, operations in records.items() if operations and not operations[-1].completed}
        self.failures.sort(key=lambda failure: failure.kind in ("deadline", "stopped") and failure.rank in waiting)
        return None

    def _watching(self) -> liveness.Watch:
        if self._watch is None:  # most calls are over before anyone looks
            pids = self._pids
            self._watch = liveness.Watch(
                self._folder, len(pids), lambda rank, thread: self._server.runs(pids[rank], thread)
            )
        return self._watch

    def _deadlocked(self) -> bool:
        """Whether some ranks wait for ever; if so, name them."""
        done = frozenset(rank.number for rank in self._ranks if self._done(rank))
        self._server.refresh(self._pids)
        stuck = self._watching().look(done)
        if not stuck:
            return False
        stacks = self._dumped([rank for rank in self._ranks if rank.number in stuck])
        ring = liveness.cycle(stuck)
        around = " -> ".join(map(str, (*ring, ring[0]))) if ring else ""
        for rank, sentence in zip(sorted(stuck), liveness.sentences(stuck, done), strict=True):
            self._fail(RankFailure(rank, "deadlock", around, sentence.removeprefix(f"rank {rank} "), stacks[rank]))
        return True

    def _done(self, rank: Rank) -> bool:
        return rank.number in self._answers or rank.number in self._failed

    def _take(self, rank: Rank) -> bool:
        """Read from a rank; False at the end of its stream."""
        try:
            frame = rank.reader.read_some()
        except EOFError:
            return False
        if frame is not None:
            kind, *content = pickle.loads(frame)
            if kind == "ok":
                self._answers[rank.number] = content[0]
            else:
                self._fail(RankFailure(rank.number, kind, *content))
        return True

    def _bury(self) -> None:
        """Name the ranks that have ended though nobody asked them to."""
        for rank in self._ranks:
            if rank.pid not in self._server.exits or rank.number in self._failed:
                continue
            rank.sock.settimeout(GRACE_S)
            with contextlib.suppress(OSError):
                while self._take(rank):  # its last words may still be in the socket
                    pass
            if rank.number not in self._failed:
                self._answers.pop(rank.number, None)
                self._fail(RankFailure.died(rank.number, self._server.exits[rank.pid], rank.stderr(self._folder)))

    def _fail(self, failure: RankFailure) -> None:
        self._failed.add(failure.rank)
        self.failures.append(failure)

    def _dump_unfinished(self) -> None:
        """Have the ranks that are still at work say where."""
        stuck = [rank for rank in self._ranks if not self._done(rank)]
        overran = not self.failures
        suspended = {rank.number for rank in stuck if self._server.suspended(rank.pid)}
        worked = f"was still at work after {time.monotonic() - self._began:.2g} s of {self._limit_s:g}"
        stacks = self._dumped(stuck)
        for rank in sorted(stuck, key=lambda rank: rank.number not in suspended):
            when = f"was not done after {self._limit_s:g} s" if overran else worked
            self.failures.append(
                RankFailure(
                    rank.number,
                    "deadline" if overran else "stopped",
                    "",
                    f"{when}: its process was stopped by a signal (state T)" if rank.number in suspended else when,
                    stacks[rank.number],
                )
            )

    def _dumped(self, ranks: Sequence[Rank]) -> dict[int, str]:
        """The Python stacks of ranks that are at work."""
        for rank in ranks:
            self._server.dump(rank.pid)
        files = {rank.number: self._folder / f"{rank.number}.stack" for rank in ranks}
        until = time.monotonic() + DUMP_S
        stacks = dict.fromkeys(files, "")
        while time.monotonic() < until:
            # A dump has no end mark: it is complete when a second look finds no more.
            before, stacks = stacks, {number: _text(file) for number, file in files.items()}
            if stacks == before and all(stacks.values()):
                break
            time.sleep(0.02)
        missing = f"(no stack: it did not answer SIGUSR1 within {DUMP_S:g} s)"
        return {number: stack or missing for number, stack in stacks.items()}


def _last(operations: list[Operation]) -> tuple[str, ...]:
    """The last of them, equal neighbours together."""
    runs = [(len(list(same)), text) for text, same in itertools.groupby(map(str, operations))]
    return tuple(f"{times} x {text}" if times > 1 else text for times, text in runs[-LAST:])


def _mismatches(records: dict[int, list[Operation]]) -> tuple[str, ...]:
    """Where the ranks disagree for certain: on what both sides have posted."""
    found = itertools.chain(disagreements(records, ended=False), unpaired(records, ended=False))
    return tuple(map(str, itertools.islice(found, MISMATCHES)))


def _text(file: Path) -> str:
    """A dump without the frames below the call: they are the same in every rank."""
    if not file.exists():
        return ""
    below = (str(Path(__file__).parent), "<frozen runpy>")
    lines = file.read_text(errors="replace").splitlines(keepends=True)
    return "".join(line for line in lines if not any(part in line for part in below))
