"""The process that ranks are forked from: it imports torch once, never computes, and outlives nobody.

A child of a process that once ran a multi-threaded OpenMP region hangs for ever, so this one only imports. When the
controller is gone, by close or by SIGKILL, it kills its ranks and removes the private folder.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from invariants.world import wire

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE = 1 << 20
ORPHANS_S = 2.5
"""How long what ranks have started may outlive them all: torch's manager of shared memory clears up after 2 s."""

IMPORTS = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch._dynamo",  # else the first optimizer of each world pays seconds for it
    "torch.nn.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.optim",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "hypothesis.core",
    "cloudpickle",
)


def main(arguments: Sequence[str]) -> None:
    """Serve the socket with descriptor number `arguments[0]`; the private folder and a JSON list of modules follow.

    A fourth one names a folder of the controller's, which is removed where the controller was killed.
    """
    sock = socket.socket(fileno=int(arguments[0]))
    folder = Path(arguments[1])
    controller = os.pidfd_open(os.getppid())
    try:
        gc.disable()  # hardly anything that modules make is garbage: to look for it took a quarter of the time
        traced = sys.gettrace()
        sys.settrace(None)  # coverage looks at each call of other people's modules, which takes a third as long again
        for name in IMPORTS:
            importlib.import_module(name)
        sys.settrace(traced)
        for name in (*json.loads(arguments[2]), "invariants.world.rank"):
            importlib.import_module(name)
        # Looks at every module that there is; ranks are then left with those that they import themselves.
        wire.dumps(None)
        # What modules want done at the end of a process is this one's affair: torch takes 0.07 s to take itself apart.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False
        # Forked ranks then neither walk these objects nor copy their pages.
        gc.freeze()
        gc.enable()
        sock.send(pickle.dumps(("ready", _devices())))
        Zygote(sock, controller, folder).serve()
    except ImportError:
        sock.send(pickle.dumps(("failed", traceback.format_exc())))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the controller left while this process was importing
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if len(arguments) > 3 and select.select([controller], [], [], 0)[0]:
            shutil.rmtree(arguments[3], ignore_errors=True)


def _devices() -> int:
    """Number of CUDA devices, asked in a child: asking may start the driver, which does not survive a fork."""
    import torch

    if torch.version.cuda is None:
        return 0
    child = os.fork()
    if child == 0:
        os._exit(min(torch.cuda.device_count(), 255))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Zygote:
    """Forks ranks, hands them their sockets, reaps them and tells how they ended."""

    def __init__(self, sock: socket.socket, controller: int, folder: Path) -> None:
        self._sock = sock
        self._folder = folder
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(controller, selectors.EVENT_READ)
        self._controller = controller
        # Shared memory of a rank that is killed is unlinked by this process's helper, at the latest when both end.
        resource_tracker.ensure_running()
        self._helpers = _children()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Obey the controller until it is gone; then end every rank."""
        try:
            while True:
                # Unbounded on purpose: what ends it is the end of the controller, which the selector reports.
                events = self._selector.select(ORPHANS_S if not self._pidfds and self._orphans() else None)
                if not events:
                    self._end_orphans(0)
                for key, _ in events:
                    if key.fileobj is self._sock:
                        if not self._obey():
                            return
                    elif key.fd == self._controller:
                        return
                    else:
                        self._reap(key.data)
        finally:
            for pid in list(self._pidfds):
                self._kill(pid)
                self._reap(pid)
            self._end_orphans(ORPHANS_S)

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._sock, _MESSAGE, 64)
        if not data:
            return False
        order, argument = pickle.loads(data)
        if order == "fork":
            first, world = argument
            pids = [self._fork(fd, rank, descriptors, world) for rank, fd in enumerate(descriptors, first)]
            for fd in descriptors:
                os.close(fd)
            self._sock.send(pickle.dumps(("forked", pids)))
        elif argument in self._pidfds:
            if order == "kill":
                self._kill(argument)
            else:
                os.kill(argument, signal.SIGUSR1)
                os.kill(argument, signal.SIGCONT)  # where it was stopped, it answers only then
        return True

    def _fork(self, fd: int, rank: int, descriptors: list[int], world: dict[str, object]) -> int:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_rank(fd, rank, zygote, self._open_descriptors(descriptors) - {fd}, world)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        return pid

    def _open_descriptors(self, descriptors: list[int]) -> set[int]:
        return {self._sock.fileno(), self._controller, *self._pidfds.values(), *descriptors}

    def _kill(self, pid: int) -> None:
        # The group: what the rank has started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _reap(self, pid: int) -> None:
        self._kill(pid)  # as long as the rank is not waited for, its number is its own
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.send(pickle.dumps(("exit", (pid, status))))

    def _orphans(self) -> set[int]:
        """What ranks had started in sessions of its own and has outlived them: it is this process's by now."""
        return {pid for pid in _children() - self._helpers - set(self._pidfds) if not os.waitpid(pid, os.WNOHANG)[0]}

    def _end_orphans(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        while self._orphans() and time.monotonic() < until:
            time.sleep(0.01)
        while orphans := self._orphans():  # each may leave others
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> set[int]:
    """Processes of which this one is the parent; none where the kernel was built without telling."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, listed.read_text().split())) if listed.exists() else set()


def _become_rank(fd: int, rank: int, zygote: int, foreign: set[int], world: dict[str, object]) -> NoReturn:
    """In the child: give up what belongs to the zygote, serve as a rank, and end as a process normally ends."""
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == zygote:  # else it died before the line above
            for other in foreign:
                os.close(other)
            from invariants.world.rank import Place, serve

            place = Place(rank, **world)  # type: ignore[arg-type]
            for stream, name in ((1, "out"), (2, "err")):
                file = os.open(place.folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(file, stream)
                os.close(file)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            with socket.socket(fileno=fd) as sock:
                serve(sock, place)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    """End as a process normally ends, except that the interpreter is not torn down.

    In a rank, backends' threads are still alive, and the frames below belong to the zygote: whatever fails here must
    not reach them. The zygote would take a third of a second, at the end of each session, to take torch apart.
    """
    try:
        atexit._run_exitfuncs()  # coverage and others write their data here
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
    _leave(0)
