"""What the controller knows of launched processes and of the ranks beside them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from invariants.world.wire import FrameReader


@dataclass
class Member:
    """A launched process that has come.

    `devices` is the number that its machine has, once it can fork; `answer` the last one that it gave, behind its
    question's number. `gone`: it has ended with the session, or is lost, and then `lost` says in words why.
    """

    sock: socket.socket
    rank: int
    local_rank: int
    name: str
    reader: FrameReader = field(init=False)
    devices: int | None = None
    answer: tuple[int, Any] = (0, None)
    lost: str = ""
    gone: bool = False

    def __post_init__(self) -> None:
        self.reader = FrameReader(self.sock)

    @property
    def address(self) -> str:
        """The address of its machine."""
        return str(self.sock.getpeername()[0])


@dataclass
class Process:
    """A rank, the folder that its world has here, and the way to it once it has been forked."""

    member: Member
    folder: Path
    sock: socket.socket | None = None
