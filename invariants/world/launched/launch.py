"""What a launcher says of this process, and the store through which the processes of a launch find each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from invariants.errors import UsageError, WorldError

START_S = 300.0
"""How long the processes of a launch may take to come together."""


@dataclass(frozen=True)
class _Names:
    """Environment variables by which a launcher numbers processes; of `local`, the first that is set."""

    launcher: str
    rank: str
    size: str
    local: tuple[str, ...]


# The innermost comes first: torchrun may be started by the others, and mpirun by srun.
_LAUNCHERS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",)),
    _Names("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    _Names("mpirun", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "SLURM_LOCALID")),
    _Names("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",)),
)
NUMBERS = frozenset(name for names in _LAUNCHERS for name in (names.rank, names.size))
"""The variables that make a process one of a launch."""


@dataclass(frozen=True)
class Launch:
    """Which process of which launch this one is; `host` and `port` are those of the store."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    agent_store: bool
    attempt: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch | None:
        """The launch that `environ` tells of; None without one, or with one of a single process.

        `MASTER_ADDR` makes the difference: torchrun sets it, and whoever starts with srun or mpirun. Without it, srun's
        and torch's variables may be those of a batch script or a container. Raises `UsageError` for what is no number.
        """
        names = next((names for names in _LAUNCHERS if names.rank in environ and names.size in environ), None)
        if names is None or "MASTER_ADDR" not in environ:
            return None
        rank, size = _number(environ, names.rank), _number(environ, names.size)
        if size < 2:
            return None
        if rank >= size:
            raise UsageError(f"{names.rank}={rank}: expected less than {names.size}={size}")
        return cls(
            names.launcher,
            rank,
            size,
            next((_number(environ, local) for local in names.local if local in environ), 0),
            environ["MASTER_ADDR"],
            _number(environ, "MASTER_PORT"),
            environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def prefix(self) -> str:
        """Before all keys of this session: the store may outlive it."""
        return f"invariants/{self.attempt}"

    def store(self) -> Any:
        """The launch's store, a `torch.distributed.Store`; rank 0 hosts it where torchrun does not.

        Raises `WorldError` where it cannot be reached.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        try:
            store = TCPStore(
                self.host,
                self.port,
                is_master=self.rank == 0 and not self.agent_store,
                wait_for_workers=False,
                timeout=timedelta(seconds=START_S),
                multi_tenant=True,
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WorldError(
                f"rank {self.rank} of {self.size} cannot reach the store at MASTER_ADDR={self.host}, "
                f"MASTER_PORT={self.port} ({reason}): is rank 0 running there?"
            ) from error
        return PrefixStore(self.prefix, store)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not text.isdecimal():
        told = "is not set" if text is None else f"is {text!r}"
        raise UsageError(f"environment variable {name} {told}: expected a number of 0 or more; or use --launcher=none")
    return int(text)


class Hidden:
    """The launcher's numbers, taken out of the environment: what tests start is no process of the launch."""

    def __init__(self) -> None:
        self._numbers = {name: os.environ.pop(name) for name in NUMBERS & os.environ.keys()}

    def restore(self) -> None:
        """Put them back."""
        os.environ.update(self._numbers)
