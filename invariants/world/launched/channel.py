"""Sockets between the processes of a launch: their port is found in the store, both ends prove that they read it there.

Traffic is as open as torch's own store and backends are: a launch belongs on a network that is trusted.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import pickle
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Any

from invariants.errors import WorldError
from invariants.world.launched.launch import START_S, Launch

LOST_S = 10.0
"""An end of which nothing, not even its kernel, is heard for so long is lost."""
PROBE_S = 2
"""How often an idle end is asked for a sign of life, by TCP itself: a process that computes need not answer."""
PROOF_S = 5.0
"""How long who has connected may take to prove that it belongs here."""
_NONCE = 32
_LENGTH = struct.Struct("!I")
_KEY = "door"


def _lively(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other side is gone, and send small frames at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, PROBE_S),
        (socket.TCP_KEEPINTVL, PROBE_S),
        (socket.TCP_KEEPCNT, int(LOST_S / PROBE_S) - 1),
        (socket.TCP_USER_TIMEOUT, int(1000 * LOST_S)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + nonce, "sha256")


@dataclass(frozen=True)
class Entrance:
    """How to reach the controller of a launch."""

    host: str
    port: int
    secret: bytes

    @classmethod
    def find(cls, launch: Launch, store: Any) -> Entrance:
        """The one that the controller has put into the store. Raises `WorldError` if it does not in time."""
        try:
            port, secret = store.get(_KEY).decode().split()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorldError(
                f"rank {launch.rank} of {launch.size}: no session of rank 0 within {START_S:g} s ({reason})"
            ) from error
        return cls(launch.host, int(port), bytes.fromhex(secret))

    def enter(self, *hello: Any) -> socket.socket:
        """A connection to the controller, who gets `hello`; returns once it has let this end in."""
        sock = socket.create_connection((self.host, self.port), timeout=LOST_S)
        try:
            _lively(sock)
            nonce = secrets.token_bytes(_NONCE)
            sock.sendall(nonce)
            # The controller opens when it needs its first world; the kernel tells if it dies before.
            sock.settimeout(None)
            theirs = _exactly(sock, _NONCE)
            if not hmac.compare_digest(_exactly(sock, _NONCE), _proof(self.secret, b"controller", nonce)):
                raise WorldError(f"who listens at {self.host}:{self.port} is not the controller of this launch")
            sock.sendall(_proof(self.secret, b"agent", theirs))
            told = pickle.dumps(hello)
            sock.sendall(_LENGTH.pack(len(told)) + told)
        except BaseException:
            sock.close()
            raise
        return sock


class Door:
    """The controller's listening socket, on the interface that `MASTER_ADDR` names and a port that is free."""

    def __init__(self, launch: Launch, store: Any) -> None:
        self.sock = _listen(launch.host, backlog=2 * launch.size)
        self.entrance = Entrance(launch.host, self.sock.getsockname()[1], secrets.token_bytes(_NONCE))
        store.set(_KEY, f"{self.entrance.port} {self.entrance.secret.hex()}")

    def admit(self) -> tuple[socket.socket, tuple[Any, ...]] | None:
        """Take one connection, and what it says of itself; None if it is none of this launch's."""
        sock, _ = self.sock.accept()
        with contextlib.suppress(OSError, EOFError):
            sock.settimeout(PROOF_S)
            _lively(sock)
            nonce = secrets.token_bytes(_NONCE)
            sock.sendall(nonce + _proof(self.entrance.secret, b"controller", _exactly(sock, _NONCE)))
            if hmac.compare_digest(_exactly(sock, _NONCE), _proof(self.entrance.secret, b"agent", nonce)):
                # Not a byte more: what follows belongs to who reads next.
                return sock, pickle.loads(_exactly(sock, *_LENGTH.unpack(_exactly(sock, _LENGTH.size))))
        sock.close()
        return None


def _listen(host: str, backlog: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    name = str(address[0])
    # A host's own name may stand for loopback in its hosts file, and for its real address elsewhere.
    hidden = ipaddress.ip_address(name.partition("%")[0]).is_loopback and host not in (name, "localhost")
    if not hidden:
        with contextlib.suppress(OSError):  # an address that is translated on the way is not this host's
            return socket.create_server((name, 0), family=family, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)
