"""The controller's side of the zygote: start it, have it fork, kill and dump ranks, learn how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from invariants.errors import UsageError, WorldError
from invariants.world.starter import ANSWER_S, Starter

IMPORT_S = 180.0
"""How long the zygote may import, on a cold disk."""
_MESSAGE = 1 << 20
LOOPBACK = {
    # By name: gloo would otherwise look up the host's.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


class Server(Starter):
    """A running zygote with its private folder, a fresh one inside `parent`.

    `owned`: `parent` is the controller's alone, and goes with it where it is killed. `interfaces` tells backends over
    which network they talk.
    """

    def __init__(
        self,
        parent: Path,
        preload: Sequence[str] = (),
        *,
        owned: bool = False,
        interfaces: Mapping[str, str] = LOOPBACK,
    ) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="worlds-", dir=parent))
        self.exits = {}
        self._interfaces = interfaces
        self._devices: int | None = None
        (self.folder / "tmp").mkdir()
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (self.folder / "zygote.err").open("wb") as stderr:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "invariants.world.zygote",
                    *self._arguments(theirs, preload),
                    *([str(parent)] if owned else []),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C is for the controller; it ends the zygote
            )

    def _arguments(self, sock: socket.socket, preload: Sequence[str]) -> list[str]:
        return [str(sock.fileno()), str(self.folder), json.dumps(list(preload))]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            # What the controller can import, the zygote can.
            "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
            **self._interfaces,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Temporary files of killed ranks go with the folder.
            "TMPDIR": str(self.folder / "tmp"),
        }

    @property
    def alive(self) -> bool:
        """Whether the zygote can still fork."""
        return self._process.poll() is None

    def devices(self) -> int:
        """Number of CUDA devices that ranks would see. Waits for the zygote's imports."""
        if self._devices is None:
            try:
                kind, value = self._receive(IMPORT_S)
            except WorldError as error:
                raise WorldError(f"{error}; it wrote:\n{self._stderr()}") from None
            if kind == "failed":
                raise UsageError(f"worlds: cannot import what ranks need: {value.strip().splitlines()[-1]}")
            self._devices = int(value)
        return self._devices

    def start(self, world: dict[str, Any], size: int) -> list[tuple[int, socket.socket]]:
        """Fork ranks 0 to `size` - 1."""
        pairs = [socket.socketpair() for _ in range(size)]
        try:
            pids = self.fork(world, [theirs for _, theirs in pairs])
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        return [(pid, ours) for pid, (ours, _) in zip(pids, pairs, strict=True)]

    def fork(self, world: dict[str, Any], sockets: Sequence[socket.socket], first: int = 0) -> list[int]:
        """Fork a rank for each socket, from rank `first` on; `world` as for `start`. Returns process ids."""
        self.devices()
        with self._naming_the_dead():
            socket.send_fds(self.sock, [pickle.dumps(("fork", (first, world)))], [each.fileno() for each in sockets])
        until = time.monotonic() + ANSWER_S
        while True:
            kind, value = self._receive(until - time.monotonic())
            if kind == "forked":
                return list(value)
            self._note(value)

    def kill(self, pid: int) -> None:
        """Kill a rank and what it started; nothing, if it is gone."""
        self._order("kill", pid)

    def dump(self, pid: int) -> None:
        """Have a rank write its Python stacks; nothing, if it is gone."""
        self._order("dump", pid)

    def suspended(self, pid: int) -> bool:
        """Whether a rank was stopped by a signal; `dump` lets it go on."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        return False

    def runs(self, pid: int, thread: int) -> bool:
        """Whether a thread of a rank, by its native id, still runs."""
        return Path(f"/proc/{pid}/task/{thread}").exists()

    def note_exit(self, timeout_s: float = ANSWER_S) -> None:
        """Read one message from the zygote; a `WorldError` if it has died."""
        _, value = self._receive(timeout_s)
        self._note(value)

    def close(self) -> None:
        """End the zygote, which kills its ranks and removes the folder."""
        self.sock.close()
        if self._devices is None:
            self._process.kill()  # still importing, or failed to: there are no ranks
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(ANSWER_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _order(self, order: str, pid: int) -> None:
        # A dead zygote has no ranks: they die with it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.send(pickle.dumps((order, pid)))

    def _note(self, value: tuple[int, int]) -> None:
        pid, status = value
        self.exits[pid] = status

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        self.sock.settimeout(max(timeout_s, 0.001))
        with self._naming_the_dead():
            try:
                data = self.sock.recv(_MESSAGE)
            except TimeoutError:
                raise WorldError(
                    f"the process that ranks are forked from did not answer in {timeout_s:.0f} s"
                ) from None
        if not data:
            raise WorldError("the process that ranks are forked from has died")
        kind, value = pickle.loads(data)
        return kind, value

    @contextlib.contextmanager
    def _naming_the_dead(self) -> Any:
        try:
            yield
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorldError("the process that ranks are forked from has died") from error

    def _stderr(self) -> str:
        return (self.folder / "zygote.err").read_text(errors="replace")[-4000:] if self.folder.exists() else ""
