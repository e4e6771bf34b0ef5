"""The controller's side of a launch: its agents, the ranks that they fork, and the loss of either."""

from __future__ import annotations

import collections
import itertools
import pickle
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from invariants.errors import WorldError
from invariants.world.launched.agent import END_S, serve_here
from invariants.world.launched.channel import LOST_S, Door
from invariants.world.launched.launch import START_S, Launch
from invariants.world.launched.members import Member, Process
from invariants.world.server import IMPORT_S
from invariants.world.starter import ANSWER_S, Meeting, Starter
from invariants.world.wire import send_frame

SETTLE_S = 5.0
"""How long they may take to send on what ranks have written."""


class Fleet(Starter):
    """Starts rank r of each world beside the launched process of rank r. Made by that of rank 0.

    It numbers ranks' processes itself: ids of several machines may be the same.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.exits = {}
        self.sock = selectors.DefaultSelector()
        self._store = launch.store()  # hosted here, or else a client: to be kept
        self._door = Door(launch, self._store)
        self.sock.register(self._door.sock, selectors.EVENT_READ)
        self._members: dict[int, Member] = {}
        self._processes: dict[int, Process] = {}
        self._numbers, self._worlds, self._settlings = itertools.count(1), itertools.count(1), itertools.count(1)
        self._own: threading.Thread | None = None
        self._patience_s = START_S

    @property
    def lost(self) -> list[str]:
        """A line for each launched process that is lost."""
        members = sorted(self._members.values(), key=lambda member: member.rank)
        return [f"rank {member.rank} is lost: {member.lost}" for member in members if member.lost]

    @property
    def alive(self) -> bool:
        """Always: what is lost here, nobody makes anew."""
        return True

    def muster(self, folder: Path, preload: Sequence[str] = ()) -> None:
        """Wait for all launched processes, and have one in this process serve as well; files go into `folder`."""
        self.folder = Path(tempfile.mkdtemp(prefix="launched-", dir=folder))
        if not self._wait(lambda: len(self._members) == self.launch.size - 1 or bool(self.lost), START_S):
            self._patience_s = 0
            missing = sorted(set(range(1, self.launch.size)) - set(self._members))
            raise WorldError(f"of {self.launch.size} launched processes, {missing} did not come within {START_S:g} s")
        self._raise_if_lost()
        # What the others have reached this one by: its own name may stand for loopback.
        address = self._members[1].sock.getsockname()[0]
        self._own = threading.Thread(
            target=serve_here, args=(self._door.entrance, self.launch.local_rank, self.folder, preload, address)
        )
        self._own.daemon = True
        self._own.start()
        self._wait(lambda: 0 in self._members, ANSWER_S)

    def lacking(self, size: int) -> str | None:
        """Why there can be no world of `size` ranks, or None."""
        if size <= self.launch.size:
            return None
        return f"a world of {size} ranks, and {self.launch.launcher} has started {self.launch.size} processes"

    def devices(self) -> int:
        """Number of ranks, from 0 on, that can have a device of their own, the one of their local rank."""
        members = [self._members[rank] for rank in sorted(self._members)]
        self._wait(lambda: all(member.devices is not None or member.lost for member in members), IMPORT_S)
        for member in members:
            if member.devices is None:
                self._lose(member, f"it could not fork within {IMPORT_S:g} s")
        self._raise_if_lost()
        return len(list(itertools.takewhile(lambda member: member.local_rank < (member.devices or 0), members)))

    def start(self, world: dict[str, Any], size: int) -> list[tuple[int, socket.socket]]:
        """Have the first `size` agents fork a rank each, which meet in the launch's store."""
        self.devices()
        members = [self._members[rank] for rank in range(size)]
        machines = collections.Counter(member.address for member in members)
        prefix = f"{self.launch.prefix}/world-{next(self._worlds)}"
        started = {}
        for member in members:
            number = next(self._numbers)
            started[number] = self._processes[number] = Process(member, world["folder"])
            for kind in ("out", "err", "stack"):
                (world["folder"] / f"{member.rank}.{kind}").touch()
            local = member.local_rank, machines[member.address]
            meeting = Meeting(self.launch.host, self.launch.port, prefix, *local)
            self._order(member, "start", number, world, meeting)
        self._wait(lambda: all(process.sock or process.member.lost for process in started.values()), ANSWER_S)
        for process in started.values():
            if process.sock is None:
                self._lose(process.member, f"it did not fork within {ANSWER_S:g} s")
        ways = [(number, process.sock) for number, process in started.items() if process.sock is not None]
        if self.lost:
            for number, sock in ways:
                self.kill(number)
                sock.close()
        self._raise_if_lost()
        return ways

    def kill(self, pid: int) -> None:
        """Kill a rank and what it started; nothing, if it is gone."""
        self._order_for(pid, "kill")

    def dump(self, pid: int) -> None:
        """Have a rank write its Python stacks, and them sent here; nothing, if it is gone."""
        self._order_for(pid, "dump")
        self.settle([pid])

    def settle(self, pids: Sequence[int]) -> None:
        """Have sent here what these ranks have written up to now."""
        asked = {process.member.rank for pid in pids if (process := self._processes.get(pid))}
        number = next(self._settlings)
        members = [self._members[rank] for rank in asked]
        for member in members:
            self._order(member, "settle", number)
        self._wait(lambda: all(member.settled >= number or member.lost for member in members), SETTLE_S)

    def note_exit(self, timeout_s: float = ANSWER_S) -> None:
        """Take what agents tell; `WorldError` if they tell nothing."""
        if not self._turn(timeout_s):
            raise WorldError(f"no launched process told anything for {timeout_s:.0f} s")

    def look(self) -> list[str]:
        """Take what has been told up to now; `lost`."""
        while self._turn(0):
            pass
        return self.lost

    def close(self) -> None:
        """Remove `folder`; agents go on to the end of the session."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self, status: int) -> int:
        """End all agents with rank 0's exit status; that status, or 1 where it is 0 and a launched process is lost."""
        try:
            expected = self.launch.size - (self._own is None)
            complete = self._wait(lambda: len(self._members) == expected, self._patience_s)
            status = status if complete else status or 1
            for member in self._members.values():
                self._order(member, "end", 1 if self.lost else status)
            self._wait(lambda: all(member.gone for member in self._members.values()), END_S)
            for member in self._members.values():
                if not member.gone:
                    self._lose(member, f"it did not end within {END_S:g} s ({member.name})")
            if self._own is not None:
                self._own.join(END_S)
        finally:
            self._door.sock.close()
            self.sock.close()
        return 1 if self.lost and not status else status

    def _raise_if_lost(self) -> None:
        __tracebackhide__ = True
        if self.lost:
            raise WorldError("; ".join(self.lost))

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not condition():
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self._turn(remaining)
        return True

    def _turn(self, timeout_s: float) -> bool:
        """Take what is told within this time; whether anything was."""
        ready = self.sock.select(max(timeout_s, 0))
        for key, _ in ready:
            if key.data is None:
                self._admit()
            else:
                self._hear(key.data)
        return bool(ready)

    def _admit(self) -> None:
        admitted = self._door.admit()
        if admitted is None:
            return
        sock, (kind, *hello) = admitted
        sock.settimeout(LOST_S)
        if kind == "agent":
            member = Member(sock, *hello)
            member.name = f"{member.name}, {member.address}"
            self._members[member.rank] = member
            self.sock.register(sock, selectors.EVENT_READ, member)
        elif (process := self._processes.get(hello[0])) is not None:
            process.sock = sock
        else:  # nobody waits for it any more
            sock.close()

    def _hear(self, member: Member) -> None:
        try:
            frames = member.reader.read_all()
        except EOFError as end:
            silent = isinstance(end.__cause__, OSError) and not isinstance(end.__cause__, ConnectionError)
            why = f"nothing was heard from it for {LOST_S:g} s" if silent else "its pytest process has ended"
            self._lose(member, f"{why} ({member.name})")
            return
        for frame in frames:
            kind, *news = pickle.loads(frame)
            if kind == "wrote":
                self._write(member, *news)
            elif kind == "exit":
                self.exits[news[0]] = news[1]
                self._processes.pop(news[0], None)
            elif kind == "ready":
                member.devices = news[0]
            elif kind == "settled":
                member.settled = news[0]
            elif kind == "ended":
                member.gone = True
                self.sock.unregister(member.sock)
                # Open until this process ends: its agent goes when its exit status is known.
                member.sock.detach()
                return
            elif kind == "gone":
                self._lose(member, f"{news[0]} ({member.name})")
                return

    def _write(self, member: Member, number: int, name: str, data: bytes, acknowledge: bool) -> None:
        process = self._processes.get(number)
        if process is not None and process.folder.is_dir():
            with (process.folder / name).open("ab") as file:
                file.write(data)
        if acknowledge:
            self._order(member, "seen")

    def _lose(self, member: Member, why: str) -> None:
        if member.gone:
            return
        member.gone = True
        self.sock.unregister(member.sock)
        member.sock.close()
        member.lost = why
        for number in [number for number, process in self._processes.items() if process.member is member]:
            self.exits[number] = why
            del self._processes[number]

    def _order_for(self, number: int, order: str) -> None:
        if (process := self._processes.get(number)) is not None:
            self._order(process.member, order, number)

    def _order(self, member: Member, *order: Any) -> None:
        if member.gone:
            return
        try:
            send_frame(member.sock, pickle.dumps(order))
        except OSError as error:
            self._lose(member, f"it takes no orders: {error} ({member.name})")
