"""A launched process at the controller's service: it forks ranks where the launcher has put it, and reports on them."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from invariants.errors import InvariantsError, WorldError
from invariants.world.launched.channel import Entrance
from invariants.world.launched.launch import Launch
from invariants.world.server import Server
from invariants.world.starter import Meeting
from invariants.world.wire import FrameReader, send_frame

DUMP_S = 1.5
"""How long a rank may take to write its stacks: less than the controller waits for them."""
LIVE_S = 0.1
"""How often output that somebody reads along is sent on."""
END_S = 10.0
"""How long the end of a session may take, on either side."""
PIECE = 1 << 14
"""Bytes of a file that are sent on while the controller need not be reading; of what is read along, it acknowledges
each piece, of a rank that has ended, this is the tail."""
TAIL = 1 << 20
"""Bytes of a file, at most, that are sent on after a call: its tail."""


@dataclass
class _Process:
    """A rank that was forked here. `sent`: how far into each of its files the controller has read."""

    pid: int
    folder: Path
    live: bool
    sent: dict[str, int] = field(default_factory=dict)


class Agent:
    """Obeys what comes over `control`; `folder` is its own, and removed with the process whatever ends it.

    Ranks communicate over the network interface that has `address`, unless the environment names another.
    """

    def __init__(
        self,
        control: socket.socket,
        entrance: Entrance,
        rank: int,
        folder: Path,
        *,
        preload: Sequence[str] = (),
        address: str | None = None,
    ) -> None:
        self._control = control
        self._reader = FrameReader(control)
        self._entrance = entrance
        self._rank = rank
        self._ready = False
        self._unseen = False
        self._processes: dict[int, _Process] = {}
        interfaces = _interfaces(address or control.getsockname()[0])
        self._server = Server(folder, preload, owned=True, interfaces=interfaces)

    def serve(self) -> int | None:
        """Run until the controller ends the session: its exit status, or None where it was lost without one.

        No rank is left then.
        """
        launcher = os.pidfd_open(os.getppid())
        try:
            with selectors.DefaultSelector() as selector:
                for source in (self._control, self._server.sock, launcher):
                    selector.register(source, selectors.EVENT_READ)
                return self._serve(selector, launcher)
        except InvariantsError as error:
            self._tell("gone", str(error))
            return None
        except (OSError, EOFError):
            return None  # the controller, or the way to it
        finally:
            self._server.close()
            os.close(launcher)
            self._tell("ended")

    def _serve(self, selector: selectors.BaseSelector, launcher: int) -> int | None:
        while True:
            live = any(process.live for process in self._processes.values())
            # Unbounded on purpose: between two tests there is nothing to wait for, and the kernel tells of a lost end.
            ready = {key.fileobj for key, _ in selector.select(LIVE_S if live else None)}
            if launcher in ready:
                self._tell("gone", "its launcher has ended")
                return None
            if self._server.sock in ready:
                self._note()
            if self._control in ready:
                for frame in self._reader.read_all():
                    order, *arguments = pickle.loads(frame)
                    if order == "end":
                        return int(arguments[0])
                    self._obey(order, arguments)
            self._report()
            if live and not self._unseen:
                self._unseen = sum(self._send_on(handle, PIECE, tail=False) for handle in self._processes) > 0

    def _note(self) -> None:
        if self._ready:
            self._server.note_exit()
        else:
            devices = self._server.devices()
            self._ready = True
            self._tell("ready", devices)

    def _obey(self, order: str, arguments: Sequence[Any]) -> None:
        if order == "start":
            self._start(*arguments)
        elif order == "settle":
            for handle in self._processes:
                self._send_on(handle, TAIL)
            self._tell("settled", *arguments)
        elif order == "seen":
            self._unseen = False
        elif (process := self._processes.get(arguments[0])) is None:
            return  # it has ended
        elif order == "kill":
            self._server.kill(process.pid)
        elif order == "dump":
            self._dump(process)
            self._send_on(arguments[0], TAIL)

    def _start(self, handle: int, world: dict[str, Any], meeting: Meeting) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"{world['size']}-", dir=self._server.folder))
        with self._entrance.enter("rank", handle) as sock:
            place = {**world, "folder": folder, "meeting": meeting}
            (pid,) = self._server.fork(place, [sock], first=self._rank)
        self._processes[handle] = _Process(pid, folder, bool(world.get("live")))

    def _dump(self, process: _Process) -> None:
        file = process.folder / f"{self._rank}.stack"
        before, until = file.stat().st_size, time.monotonic() + DUMP_S
        self._server.dump(process.pid)
        seen = before
        while time.monotonic() < until:
            # A dump has no end mark: it is complete when a second look finds no more.
            last, seen = seen, file.stat().st_size
            if seen == last > before:
                return
            time.sleep(0.02)

    def _report(self) -> None:
        """Tell of ranks that have ended, after their last words."""
        for handle, process in list(self._processes.items()):
            if process.pid in self._server.exits:
                self._send_on(handle, PIECE)
                self._tell("exit", handle, self._server.exits.pop(process.pid))
                shutil.rmtree(process.folder, ignore_errors=True)
                del self._processes[handle]

    def _send_on(self, handle: int, limit: int, *, tail: bool = True) -> bool:
        """Send what a rank has written since the last time, or the tail of it; whether that was anything."""
        process = self._processes[handle]
        found = False
        for path in sorted(process.folder.glob(f"{self._rank}.*")):
            start, size = process.sent.get(path.name, 0), path.stat().st_size
            if size <= start or path.suffix == ".record":  # that one is written to in place
                continue
            skipped = tail and size - start > limit
            with path.open("rb") as file:
                file.seek(size - limit if skipped else start)
                data = file.read(limit)
                process.sent[path.name] = file.tell()
            # Whole lines.
            self._tell("wrote", handle, path.name, data[data.find(b"\n") + 1 :] if skipped else data, not tail)
            found = True
        return found

    def _tell(self, *news: Any) -> None:
        with contextlib.suppress(OSError):  # a lost controller is noticed where its orders are read
            send_frame(self._control, pickle.dumps(news))


def serve(launch: Launch) -> int | None:
    """Serve as one of the launched processes; as `Agent.serve`. Raises `WorldError` where rank 0 is not to be found."""
    store = launch.store()
    entrance = Entrance.find(launch, store)
    try:
        control = entrance.enter("agent", launch.rank, launch.local_rank, who())
    except (OSError, EOFError) as error:
        raise WorldError(f"rank {launch.rank} of {launch.size}: rank 0 has left before its session began") from error
    with control:
        with tempfile.TemporaryDirectory(prefix="invariants-", ignore_cleanup_errors=True) as folder:
            status = Agent(control, entrance, launch.rank, Path(folder)).serve()
        if status is not None:
            _outlast(control)
    return status


def _outlast(control: socket.socket) -> None:
    """Wait for the end of rank 0: of a launch whose first process fails, launchers kill the others."""
    control.settimeout(END_S)
    with contextlib.suppress(OSError):
        while control.recv(1 << 10):
            pass


def serve_here(entrance: Entrance, local_rank: int, folder: Path, preload: Sequence[str], address: str) -> None:
    """Serve as rank 0, in a thread of the controller, over a socket like the others."""
    # The controller may have closed its door.
    with contextlib.suppress(OSError, EOFError), entrance.enter("agent", 0, local_rank, who()) as control:
        Agent(control, entrance, 0, folder, preload=preload, address=address).serve()


def who() -> str:
    """This process, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _interfaces(address: str) -> dict[str, str]:
    """For gloo and NCCL, the interface that has `address`: each process of a launch reaches the others over it."""
    found = [name for name, all_of_it in psutil.net_if_addrs().items() if any(a.address == address for a in all_of_it)]
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, found[0]) for name in variables if name in os.environ or found}
