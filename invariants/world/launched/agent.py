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
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from invariants.errors import InvariantsError, WorldError
from invariants.world.launched.channel import Entrance
from invariants.world.launched.launch import Launch
from invariants.world.record import SIZE, Reader
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
RECORD = 1 << 16
"""Bytes that the packed record of such a rank may have."""
TAIL = 1 << 20
"""Bytes of a file, at most, that are sent on after a call: its tail."""


@dataclass
class _Process:
    """A rank that was forked here.

    `sent`: how far into each of its files the controller has read; `pulse`: of its record at the last look, `copied`:
    of the copy that the controller has.
    """

    pid: int
    folder: Path
    live: bool
    sent: dict[str, int] = field(default_factory=dict)
    record: Reader | None = None
    pulse: tuple[int, int] | None = None
    copied: tuple[int, int] | None = None


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
                try:
                    frames = self._reader.read_all()
                except EOFError:
                    return None
                for frame in frames:
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
        elif order == "seen":
            self._unseen = False
        elif order == "ask":
            number, question, *details = arguments
            self._tell("answer", number, self._answer(question, details))
        elif (process := self._processes.get(arguments[0])) is not None:
            self._server.kill(process.pid)

    def _answer(self, question: str, details: Sequence[Any]) -> Any:
        if question == "settle":
            for handle in self._processes:
                self._send_on(handle, TAIL)
            return None
        if question == "records":
            copies = {handle: self._copy(process, moving=details[0]) for handle, process in self._processes.items()}
            return {handle: copy for handle, copy in copies.items() if copy != b""}
        if (process := self._processes.get(details[0])) is None:
            return None  # it has ended
        if question == "dump":
            self._dump(process)
            self._send_on(details[0], TAIL)
            return None
        if question == "suspended":
            return self._server.suspended(process.pid)
        return self._server.runs(process.pid, details[1])

    def _copy(self, process: _Process, *, moving: bool) -> bytes | None:
        """A rank's record; nothing if it was sent before, None if the rank goes on communicating."""
        path = process.folder / f"{self._rank}.record"
        if _size(path) < SIZE:
            return None
        if process.record is None:
            process.record = Reader(path, self._rank)
        before, process.pulse = process.pulse, process.record.pulse()
        if process.pulse == process.copied:
            return b""
        if not moving and process.pulse != before:
            return None
        copy = zlib.compress(process.record.copy(), 1)
        still = process.pulse == process.record.pulse()
        process.copied = process.pulse if still else None
        return copy if still or moving else None

    def _start(self, handle: int, world: dict[str, Any], meeting: Meeting) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"{world['size']}-", dir=self._server.folder))
        try:
            way = self._entrance.enter("rank", handle)
        except (OSError, EOFError):
            return  # the controller is lost, which shows where its orders are read
        with way as sock:
            place = {**world, "folder": folder, "meeting": meeting}
            (pid,) = self._server.fork(place, [sock], first=self._rank)
        self._processes[handle] = _Process(pid, folder, bool(world.get("live")))

    def _dump(self, process: _Process) -> None:
        file = process.folder / f"{self._rank}.stack"
        before, until = _size(file), time.monotonic() + DUMP_S
        self._server.dump(process.pid)
        seen = before
        while time.monotonic() < until:
            # A dump has no end mark: it is complete when a second look finds no more.
            last, seen = seen, _size(file)
            if seen == last > before:
                return
            time.sleep(0.02)

    def _report(self) -> None:
        """Tell of ranks that have ended, after their last words."""
        for handle, process in list(self._processes.items()):
            if process.pid in self._server.exits:
                status = self._server.exits.pop(process.pid)
                self._send_on(handle, PIECE)
                record = (self._copy(process, moving=True) if status else None) or b""
                self._tell("exit", handle, status, record if len(record) <= RECORD else b"")
                if process.record is not None:
                    process.record.close()
                shutil.rmtree(process.folder, ignore_errors=True)
                del self._processes[handle]

    def _send_on(self, handle: int, limit: int, *, tail: bool = True) -> bool:
        """Send what a rank has written since the last time, or the tail of it; whether that was anything."""
        process = self._processes[handle]
        found = False
        for path in sorted(process.folder.glob(f"{self._rank}.*")):
            start, size = process.sent.get(path.name, 0), _size(path)
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


def unpacked(record: bytes) -> bytes:
    """A rank's record, as an agent sends it."""
    return zlib.decompress(record)


def who() -> str:
    """This process, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _interfaces(address: str) -> dict[str, str]:
    """For gloo and NCCL, the interface that has `address`: each process of a launch reaches the others over it."""
    found = [name for name, all_of_it in psutil.net_if_addrs().items() if any(a.address == address for a in all_of_it)]
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, found[0]) for name in variables if name in os.environ or found}
