"""Where ranks come from: what a world needs of whoever forks them, on this machine or on several."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invariants.errors import WorldError

ANSWER_S = 30.0
"""How long who forks, and never computes, may take to fork or to end."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks of several machines meet: a prefix in the store of a launcher; and which of its machine one is."""

    host: str
    port: int
    prefix: str
    local_rank: int
    local_size: int


class Starter(ABC):
    """Starts ranks and follows them to their end.

    `sock` is readable when there is news for `note_exit`, which `exits` then has: by number of a rank's process, its
    exit status, or in words why nothing more will be heard of it. A world's files are in a folder inside `folder`.
    """

    folder: Path
    exits: dict[int, int | str]
    sock: Any

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can still start ranks."""

    @abstractmethod
    def devices(self) -> int:
        """Number of ranks that can have a CUDA device of their own. Waits until ranks can be started."""

    @abstractmethod
    def start(self, world: dict[str, Any], size: int) -> list[tuple[int, socket.socket]]:
        """Start ranks 0 to `size` - 1, each with its process's number and the controller's end of its socket.

        `world` is `rank.Place` without the rank.
        """

    @abstractmethod
    def kill(self, pid: int) -> None:
        """Kill a rank and what it started; nothing, if it is gone."""

    @abstractmethod
    def dump(self, pid: int) -> None:
        """Have a rank write its Python stacks; nothing, if it is gone."""

    @abstractmethod
    def note_exit(self, timeout_s: float = ANSWER_S) -> None:
        """Take note of one piece of news; `WorldError` if none comes, or can come."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks and remove `folder`."""

    def lacking(self, size: int) -> str | None:  # noqa: ARG002
        """Why there can be no world of `size` ranks, or None."""
        return None

    def suspended(self, pid: int) -> bool:  # noqa: ARG002
        """Whether a rank was stopped by a signal, as far as that can be seen from here."""
        return False

    def runs(self, pid: int, thread: int) -> bool:  # noqa: ARG002
        """Whether a thread of a rank, by its native id, still runs, as far as that can be seen from here."""
        return True

    def refresh(self, pids: Sequence[int], *, moving: bool = False) -> None:  # noqa: B027
        """Bring what is to be read of these ranks' records in their world's folder up to date.

        Of ranks that go on communicating, only if `moving`; the others' show that they wait for nothing.
        """

    def settle(self, pids: Sequence[int]) -> None:  # noqa: B027
        """Return when all that these ranks have written up to now can be read in their world's folder."""

    def wait_exits(self, pids: Sequence[int], timeout_s: float) -> bool:
        """Wait until all of `pids` have ended and were reaped; whether they have."""
        until = time.monotonic() + timeout_s
        while not all(pid in self.exits for pid in pids):
            try:
                self.note_exit(until - time.monotonic())
            except WorldError:  # too late, or the zygote is dead and its ranks with it
                return False
        return True
