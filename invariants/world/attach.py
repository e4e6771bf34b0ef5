"""`breakpoint()` on a rank: pdb behind a Unix socket, and `python -m invariants.world.attach PATH` to talk to it.

The socket is in the world's private folder, which nobody but the user may enter.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import select
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from invariants.errors import UsageError


class Breakpoint:
    """What `breakpoint()` does on a rank.

    `live`: what a rank prints is seen at once, so it can say where it waits. `limit_s` bounds the wait.
    """

    def __init__(self, folder: Path, rank: int, *, live: bool, limit_s: float) -> None:
        self._path = folder / f"{rank}.pdb"
        self._rank = rank
        self._live = live
        self._limit_s = limit_s
        self._debugger: pdb.Pdb | None = None
        self._attached = contextlib.ExitStack()

    @contextlib.contextmanager
    def during_call(self) -> Iterator[None]:
        """Take the place of the usual hook, unless PYTHONBREAKPOINT names another; at the end, let go who attached."""
        if "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = pdb.set_trace = self
        try:
            yield
        finally:
            if self._debugger is not None:
                sys.settrace(None)
                with contextlib.suppress(OSError):  # who attached may have left
                    self._attached.close()
                self._debugger = None

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        """Wait for somebody to attach, then stop there."""
        frame = sys._getframe(1)
        where = f"breakpoint() at {frame.f_code.co_filename}:{frame.f_lineno} on rank {self._rank}"
        if not self._live:
            raise UsageError(
                f"{where}: a rank has no terminal; run pytest with -s and --world-deadline=3600: "
                "it then waits, and tells the command that attaches a debugger"
            )
        if self._debugger is None:
            self._debugger = self._wait(where)
        self._debugger.set_trace(frame)

    def _wait(self, where: str) -> pdb.Pdb:
        with socket.socket(socket.AF_UNIX) as listener:
            with _address(self._path) as address:
                listener.bind(address)
            listener.listen()
            listener.settimeout(self._limit_s)
            print(f"{where}: within {self._limit_s:g} s: python -m {__spec__.name} {self._path}", flush=True)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise UsageError(
                    f"{where}: nobody attached within {self._limit_s:g} s; --world-deadline=3600 waits for an hour"
                ) from None
            finally:
                self._path.unlink()
        self._attached.enter_context(connection)
        # Two files: one for both directions drops what was typed ahead.
        commands, answers = (
            self._attached.enter_context(connection.makefile(mode, encoding="utf-8")) for mode in ("r", "w")
        )
        return pdb.Pdb(stdin=commands, stdout=answers, nosigint=True)


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """An address of the socket at `path`, which itself may be longer than the 107 bytes that one may have."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def main(arguments: Sequence[str]) -> int:
    """Connect the terminal to the debugger that waits at the path `arguments[0]`, until either side ends."""
    path = Path(arguments[0]).absolute()
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            with _address(path) as address:
                sock.connect(address)
        except OSError as error:
            print(f"{path}: no rank waits here: {error.strerror}", file=sys.stderr)
            return 1
        sources = [sock.fileno(), sys.stdin.fileno()]
        while True:
            # Unbounded on purpose: who debugs takes their time; the rank's end closes the socket.
            for source in select.select(sources, [], [])[0]:
                data = os.read(source, 1 << 16)
                if source == sock.fileno():
                    if not data:
                        return 0
                    sys.stdout.buffer.write(data)
                    sys.stdout.flush()
                elif data:
                    sock.sendall(data)
                else:
                    sources.remove(source)
                    sock.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
