"""A world: ranks that run a function together, as their controller sees them."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from invariants.errors import UsageError, WorldError
from invariants.world.collect import Collection, Rank
from invariants.world.failure import RankFailed, RankFailure
from invariants.world.guard import LIMIT_S, allowed
from invariants.world.left import in_step
from invariants.world.output import Listener, Output
from invariants.world.starter import Starter
from invariants.world.wire import dumps, loads

EXIT_S = 5.0
"""How long an idle rank may take to end by itself, exit hooks included."""
SLOT_S = 1800.0
"""How long a call may wait for other workers' worlds; each of them is bound by its own deadline."""
BACKEND_SHARE = 0.9
"""The backend's own time limit, as a share of the deadline: it names the operation, if it comes first."""


class World:
    """`size` ranks, forked when first needed and again after each failure; made by `WorldPool`.

    `backend` gives gloo or nccl; `server` where ranks come from; `deadline_s` is asked at each call that brings none;
    `slot` is the lock file of worlds that fill the cores; `relay` and `live` are those of the pool.
    """

    def __init__(
        self,
        size: int,
        backend: Callable[[int], str],
        server: Callable[[], Starter],
        deadline_s: Callable[[], float],
        slot: Path | None,
        *,
        relay: bool = False,
        live: bool = False,
    ) -> None:
        self.size = size
        self._backend = backend
        self._server = server
        self._deadline_s = deadline_s
        self._slot = FileLock(slot) if slot is not None and size >= (os.cpu_count() or 1) else None
        self._ranks: list[Rank] = []
        self._home: Starter | None = None
        self._folder = Path()
        self._heard = {"relay": relay, "live": live}
        self._listener = Listener(self._folder, 0, **self._heard)
        self._made_for_s = 0.0
        self._used = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank, under a launcher numbers instead; empty before the first call and after a failure."""
        return tuple(rank.pid for rank in self._ranks)

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float | None = None) -> list[Any]:
        """Call `function(context, *args)` on each rank; the results in rank order.

        Tensors in results arrive detached, on the CPU. Raises `RankFailed` if a rank raises, dies or is not done within
        `deadline_s` seconds of wall time, counted from when this world may compute.
        """
        __tracebackhide__ = True  # pytest then shows the test's own line, and below it what the rank says
        limit_s = self._deadline_s() if deadline_s is None else deadline_s
        if not allowed(limit_s):
            raise UsageError(f"deadline_s={limit_s!r}: expected a number of seconds above 0 and below {LIMIT_S:g}")
        try:
            cargo = dumps((function, args))
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))
            reason = f"{type(error).__name__}: {error}"
            raise WorldError(f"{name} and its arguments cannot be sent to ranks: {reason}") from error
        with self._computing():
            self._start(limit_s)
            self._used = True
            answers = self._ask(pickle.dumps((sys.path, self._listener.levels(), cargo)), limit_s)
        self._listener.hand_on(self._listener.take())
        return [self._read(rank, answer) for rank, answer in enumerate(answers)]

    def reset(self) -> None:
        """Undo what was left behind on the ranks since the last reset; see `invariants.world.state`.

        A world whose ranks have communicated unequally, or know different groups, is replaced instead. Raises
        `RankFailed` if a rank has died since its last answer.
        """
        if not self._ranks or not self._used:
            return
        self._used = False
        if not in_step([loads(answer) for answer in self._ask(pickle.dumps(None), self._deadline_s())]):
            self._end()
            return
        self._listener.forget()

    def outputs(self) -> tuple[Output, ...]:
        """The end of what each rank has printed since the last reset."""
        return self._listener.outputs() if self._ranks and self._used else ()

    def close(self) -> None:
        """End the ranks; a later call starts new ones. Raises `RankFailed` if an idle rank does not end in order."""
        failures = self._end()
        if failures:
            raise RankFailed(self.size, failures)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Hold the slot if this world fills the cores: over all workers, one such world computes at a time."""
        if self._slot is None:
            yield
            return
        try:
            self._slot.acquire(timeout=SLOT_S, poll_interval=0.005)
        except Timeout:
            held = f"other workers held {self._slot.lock_file} for {SLOT_S:g} s"
            raise WorldError(f"world of {self.size}: {held}: run fewer workers, or smaller worlds") from None
        try:
            yield
        finally:
            self._slot.release()

    def _start(self, limit_s: float) -> None:
        __tracebackhide__ = True
        if self._ranks and limit_s > self._made_for_s and not self._used:
            self._end()  # its backend would give up before the deadline
        if self._ranks:
            return
        backend = self._backend(self.size)
        self._home = self._server()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.size}-", dir=self._home.folder))
        self._made_for_s = limit_s
        place = {
            "size": self.size,
            "backend": backend,
            "folder": self._folder,
            "timeout_s": BACKEND_SHARE * limit_s,
            **self._heard,
        }
        self._listener = Listener(self._folder, self.size, **self._heard)
        self._ranks = [Rank(number, *started) for number, started in enumerate(self._home.start(place, self.size))]
        self._collect(limit_s)

    def _ask(self, command: bytes, limit_s: float) -> list[bytes]:
        __tracebackhide__ = True
        for rank in self._ranks:
            rank.send(command, limit_s)
        return self._collect(limit_s)

    def _collect(self, limit_s: float) -> list[bytes]:
        __tracebackhide__ = True
        assert self._home is not None
        collection = Collection(self._ranks, self._home, self._folder, limit_s)
        try:
            with self._listener.shown():
                answers = collection.collect()
                self._home.settle([rank.pid for rank in self._ranks])
        except BaseException:  # a Ctrl-C too: what the ranks do now, nobody waits for
            self._end(kill=tuple(self._ranks))
            raise
        if answers is None:
            raise self._failed(collection)
        return answers

    def _failed(self, collection: Collection) -> RankFailed:
        """What is known of a failure, once the world is gone."""
        failure = RankFailed(self.size, collection.failures, collection.mismatches)
        failure.outputs = self._listener.outputs(failure.blamed)
        notices = self._listener.take()
        self._end(kill=collection.unfinished)
        try:
            self._listener.hand_on(notices)
        except Warning as warning:  # filters make it an error; it came first, and is told so
            failure.__context__ = warning
        return failure

    def _end(self, kill: tuple[Rank, ...] = ()) -> list[RankFailure]:
        """Kill some ranks, have the others end by themselves, reap all; return who did not end in order."""
        ranks, self._ranks, self._used = self._ranks, [], False
        home = self._home
        if not ranks or home is None:
            return []
        for rank in kill:
            home.kill(rank.pid)
        for rank in ranks:
            rank.sock.close()
        home.wait_exits([rank.pid for rank in ranks], EXIT_S)
        late = [rank for rank in ranks if rank.pid not in home.exits]
        for rank in late:
            home.kill(rank.pid)
        home.wait_exits([rank.pid for rank in late], EXIT_S)
        failures = (
            []
            if not home.alive
            else [
                RankFailure(rank.number, "stopped", "", f"did not end within {EXIT_S:g} s of being asked to", "")
                if rank in late
                else RankFailure.died(rank.number, status, rank.stderr(self._folder))
                for rank in ranks
                if (status := home.exits.pop(rank.pid, -9)) and rank not in kill
            ]
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        return failures

    def _read(self, rank: int, answer: bytes) -> Any:
        __tracebackhide__ = True
        try:
            return loads(answer)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise WorldError(f"the result of rank {rank} cannot be unpickled here: {reason}") from error
