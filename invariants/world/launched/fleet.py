"""Worlds of a launch: rank r of each is forked beside the launched process of rank r."""

from __future__ import annotations

import collections
import itertools
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from invariants.errors import WorldError
from invariants.world.launched.agent import END_S, serve_here, unpacked
from invariants.world.launched.crew import Crew
from invariants.world.launched.launch import START_S, Launch
from invariants.world.launched.members import Member, Process
from invariants.world.record import SIZE, WAITING
from invariants.world.server import IMPORT_S
from invariants.world.starter import ANSWER_S, Meeting, Starter


class Fleet(Starter):
    """Made by the launched process of rank 0. It numbers ranks itself: process ids of two machines may be the same."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.exits = {}
        self._crew = Crew(launch, self)
        self.sock = self._crew.selector
        self._processes: dict[int, Process] = {}
        self._numbers, self._worlds = itertools.count(1), itertools.count(1)
        self._own: threading.Thread | None = None

    @property
    def lost(self) -> list[str]:
        """A line for each launched process that is known to be lost."""
        return self._crew.lost

    @property
    def alive(self) -> bool:
        """Always: what is lost here, nobody makes anew."""
        return True

    def muster(self, folder: Path, preload: Sequence[str] = ()) -> None:
        """Wait for all launched processes, and have one in this process serve as well; files go into `folder`."""
        self.folder = Path(tempfile.mkdtemp(prefix="launched-", dir=folder))
        if not self._crew.gather(self.launch.size - 1):
            self._raise_if_lost()
            missing = ", ".join(map(str, sorted(set(range(1, self.launch.size)) - set(self._crew.members))))
            raise WorldError(f"{self.launch.size} processes launched, but not come within {START_S:g} s: {missing}")
        # What the others have reached this one by: its own name may stand for loopback.
        address = self._crew.members[1].sock.getsockname()[0]
        here = (self._crew.entrance, self.launch.local_rank, self.folder, preload, address)
        self._own = threading.Thread(target=serve_here, args=here, daemon=True)
        self._own.start()
        self._crew.wait(lambda: 0 in self._crew.members, ANSWER_S)

    def lacking(self, size: int) -> str | None:
        """Why there can be no world of `size` ranks, or None."""
        if size <= self.launch.size:
            return None
        return f"a world of {size} ranks, and {self.launch.launcher} has started {self.launch.size} processes"

    def devices(self) -> int:
        """Number of ranks, from 0 on, that can have a device of their own: the one with the number of their local rank.

        Raises `WorldError` where a launched process is lost.
        """
        members = [self._crew.members[rank] for rank in sorted(self._crew.members)]
        self._crew.wait(lambda: all(member.devices is not None or member.gone for member in members), IMPORT_S)
        for member in members:
            if member.devices is None:
                self._crew.lose(member, f"it could not fork within {IMPORT_S:g} s")
        self._raise_if_lost()
        return len(list(itertools.takewhile(lambda member: member.local_rank < (member.devices or 0), members)))

    def start(self, world: dict[str, Any], size: int) -> list[tuple[int, socket.socket]]:
        """Have the first `size` launched processes fork a rank each; these meet in the launch's store."""
        self.devices()
        members = [self._crew.members[rank] for rank in range(size)]
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
            self._crew.order(member, "start", number, world, meeting)
        self._crew.wait(lambda: all(process.sock or process.member.gone for process in started.values()), ANSWER_S)
        for process in started.values():
            if process.sock is None:
                self._crew.lose(process.member, f"it did not fork within {ANSWER_S:g} s")
        ways = [(number, process.sock) for number, process in started.items() if process.sock is not None]
        if self._crew.lost:
            for number, sock in ways:
                self.kill(number)
                sock.close()
        self._raise_if_lost()
        return ways

    def kill(self, pid: int) -> None:
        """Kill a rank and what it started; nothing, if it is gone."""
        if (process := self._processes.get(pid)) is not None:
            self._crew.order(process.member, "kill", pid)

    def dump(self, pid: int) -> None:
        """Have a rank write its Python stacks, and them sent here; nothing, if it is gone."""
        self._ask([pid], "dump", pid)

    def suspended(self, pid: int) -> bool:
        """Whether a rank was stopped by a signal."""
        return any(self._ask([pid], "suspended", pid).values())

    def runs(self, pid: int, thread: int) -> bool:
        """Whether a thread of a rank, by its native id, still runs."""
        return any(self._ask([pid], "runs", pid, thread).values())

    def settle(self, pids: Sequence[int]) -> None:
        """Have sent here what these ranks have written up to now."""
        self._ask(pids, "settle")

    def refresh(self, pids: Sequence[int], *, moving: bool = False) -> None:
        """Have sent here the records of these ranks, where they have changed and, unless `moving`, stand still now."""
        for records in self._ask(pids, "records", moving).values():
            for number, record in records.items():
                self._keep(number, record)

    def note_exit(self, timeout_s: float = ANSWER_S) -> None:
        """Take what is told; `WorldError` if nothing is."""
        if not self._crew.turn(timeout_s):
            raise WorldError(f"no launched process told anything for {timeout_s:.0f} s")

    def look(self) -> list[str]:
        """Take what has been told up to now; a line for each launched process that is lost."""
        while self._crew.turn(0):
            pass
        return self.lost

    def close(self) -> None:
        """Remove `folder`; launched processes go on to the end of the session."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self, status: int) -> int:
        """End all launched processes with rank 0's exit status; it, or 1 where it is 0 and one of them is lost."""
        status = self._crew.dismiss(self.launch.size - (self._own is None), status)
        if self._own is not None:
            self._own.join(END_S)
        return status

    def arrive(self, number: int, sock: socket.socket) -> None:
        """The rank with this number is at the other end of `sock`."""
        if (process := self._processes.get(number)) is not None:
            process.sock = sock
        else:  # nobody waits for it any more
            sock.close()

    def hear(self, member: Member, kind: str, news: list[Any]) -> None:
        """What ranks have written, or how one has ended."""
        number, *content = news
        if kind == "exit":
            status, record = content
            if record:
                self._keep(number, record)
            self.exits[number] = status
            self._processes.pop(number, None)
            return
        name, data, acknowledge = content
        process = self._processes.get(number)
        if process is not None and process.folder.is_dir():
            with (process.folder / name).open("ab") as file:
                file.write(data)
        if acknowledge:
            self._crew.order(member, "seen")

    def part(self, member: Member) -> None:
        """All ranks of a launched process are lost with it."""
        for number in [number for number, process in self._processes.items() if process.member is member]:
            self.exits[number] = member.lost
            del self._processes[number]

    def _keep(self, number: int, record: bytes | None) -> None:
        """Write the record of a rank to where it is looked for; None: it waits for nothing."""
        process = self._processes.get(number)
        if process is None or not process.folder.is_dir():
            return
        path = process.folder / f"{process.member.rank}.record"
        path.touch()
        with path.open("r+b") as file:  # in place: it may be mapped
            file.truncate(SIZE)
            if record is None:
                file.seek(8 * WAITING)
            file.write(bytes(8) if record is None else unpacked(record))

    def _ask(self, pids: Iterable[int], question: str, *arguments: Any) -> dict[int, Any]:
        known = [process.member for pid in pids if (process := self._processes.get(pid)) is not None]
        return self._crew.ask(known, question, *arguments)

    def _raise_if_lost(self) -> None:
        __tracebackhide__ = True
        if self._crew.lost:
            raise WorldError("; ".join(self._crew.lost))
