"""The controller's connections: who of a launch has come, what is asked and answered, and who is lost."""

from __future__ import annotations

import itertools
import pickle
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from invariants.world.launched.agent import END_S
from invariants.world.launched.channel import LOST_S, Door
from invariants.world.launched.launch import START_S, Launch
from invariants.world.launched.members import Member
from invariants.world.starter import ANSWER_S
from invariants.world.wire import send_frame


class Audience(Protocol):
    """Who is told what comes in."""

    def arrive(self, number: int, sock: socket.socket) -> None:
        """The rank with this number is at the other end of `sock`."""

    def hear(self, member: Member, kind: str, news: list[Any]) -> None:
        """A launched process tells of its ranks."""

    def part(self, member: Member) -> None:
        """Nothing will be heard of this one any more, nor of its ranks."""


class Crew:
    """The launched processes, by rank. `selector` is readable when one of them has something to tell."""

    def __init__(self, launch: Launch, audience: Audience) -> None:
        self.members: dict[int, Member] = {}
        self.selector = selectors.DefaultSelector()
        self._audience = audience
        self._store = launch.store()  # hosted here, or else a client: to be kept
        self._door = Door(launch, self._store)
        self.selector.register(self._door.sock, selectors.EVENT_READ)
        self.entrance = self._door.entrance
        self._questions = itertools.count(1)
        self._patience_s = START_S

    @property
    def lost(self) -> list[str]:
        """A line for each launched process that is lost."""
        members = sorted(self.members.values(), key=lambda member: member.rank)
        return [f"rank {member.rank} is lost: {member.lost}" for member in members if member.lost]

    def gather(self, number: int) -> bool:
        """Wait until so many have come, or one is lost; whether all are there. Who once did not come is not awaited."""
        complete = self.wait(lambda: len(self.members) >= number or bool(self.lost), self._patience_s)
        if not complete:
            self._patience_s = 0
        return complete and not self.lost

    def wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Take what is told until a condition holds; whether it does in time."""
        until = time.monotonic() + limit_s
        while not condition():
            if (remaining := until - time.monotonic()) <= 0:
                return False
            self.turn(remaining)
        return True

    def turn(self, timeout_s: float) -> bool:
        """Take what is told within this time; whether anything was."""
        ready = self.selector.select(max(timeout_s, 0))
        for key, _ in ready:
            if key.data is None:
                self._admit()
            else:
                self._hear(key.data)
        return bool(ready)

    def ask(self, members: Iterable[Member], question: str, *arguments: Any) -> dict[int, Any]:
        """The answers, by rank; who gives none in time is lost."""
        number, asked = next(self._questions), list(members)
        for member in asked:
            self.order(member, "ask", number, question, *arguments)
        self.wait(lambda: all(member.answer[0] >= number or member.gone for member in asked), ANSWER_S)
        for member in asked:
            if member.answer[0] < number:
                self.lose(member, f"it did not answer within {ANSWER_S:g} s")
        return {member.rank: member.answer[1] for member in asked if member.answer[0] == number}

    def order(self, member: Member, *order: Any) -> None:
        """Have a launched process do something; nothing, if it is gone."""
        if member.gone:
            return
        try:
            send_frame(member.sock, pickle.dumps(order))
        except OSError as error:
            self.lose(member, f"it takes no orders: {error}")

    def lose(self, member: Member, why: str) -> None:
        """Count a launched process as lost."""
        if member.gone:
            return
        member.gone = True
        self.selector.unregister(member.sock)
        member.sock.close()
        member.lost = f"{why} ({member.name})"
        self._audience.part(member)

    def dismiss(self, expected: int, status: int) -> int:
        """End all that are to come with an exit status; it, or 1 where it is 0 and one is missing or lost."""
        try:
            if not self.gather(expected):
                status = status or 1
            for member in self.members.values():
                self.order(member, "end", status)
            self.wait(lambda: all(member.gone for member in self.members.values()), END_S)
            for member in self.members.values():
                self.lose(member, f"it did not end within {END_S:g} s")
        finally:
            self._door.sock.close()
            self.selector.close()
        return 1 if self.lost and not status else status

    def _admit(self) -> None:
        admitted = self._door.admit()
        if admitted is None:
            return
        sock, (kind, *hello) = admitted
        sock.settimeout(LOST_S)
        if kind == "rank":
            self._audience.arrive(hello[0], sock)
            return
        member = Member(sock, *hello)
        member.name = f"{member.name}, {member.address}"
        self.members[member.rank] = member
        self.selector.register(sock, selectors.EVENT_READ, member)

    def _hear(self, member: Member) -> None:
        try:
            frames = member.reader.read_all()
        except EOFError as end:
            silent = isinstance(end.__cause__, OSError) and not isinstance(end.__cause__, ConnectionError)
            self.lose(
                member, f"nothing was heard from it for {LOST_S:g} s" if silent else "its pytest process has ended"
            )
            return
        for frame in frames:
            kind, *news = pickle.loads(frame)
            if kind == "answer":
                member.answer = (news[0], news[1])
            elif kind == "ready":
                member.devices = news[0]
            elif kind == "gone":
                self.lose(member, news[0])
                return
            elif kind == "ended":
                member.gone = True
                self.selector.unregister(member.sock)
                # Open until this process ends: the other goes when the exit status of this one is known.
                member.sock.detach()
                return
            else:
                self._audience.hear(member, kind, news)
