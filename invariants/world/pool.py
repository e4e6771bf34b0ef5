"""The pool of worlds of a session: warm, reused, replaced when broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from invariants.errors import UsageError
from invariants.world.failure import RankFailed
from invariants.world.guard import LIMIT_S, allowed
from invariants.world.output import Output
from invariants.world.server import Server
from invariants.world.starter import Starter
from invariants.world.world import World

Backend = Literal["auto", "gloo", "nccl"]

__all__ = ["RankFailed", "World", "WorldPool"]


class WorldPool:
    """Worlds by size, forked from one server that has only imported torch.

    Everything on disk lives in a fresh private folder inside `folder`, which goes with the pool, whatever ends the
    controller. `backend="auto"` is nccl where each rank has a device of its own, else gloo. `deadline_s` bounds each
    call that brings no deadline, and may be set at any time. `slots` is a folder that all workers of a session share:
    of their worlds that fill the cores, one computes at a time; None leaves it to the system. `preload` names modules
    that the server imports, so that no rank has to. `owned`: nothing in `folder` outlives a controller that is killed.
    `starter` is where ranks come from instead of a server of this pool's own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        backend: str = "auto",
        deadline_s: float = 30.0,
        slots: Path | None = None,
        preload: Sequence[str] = (),
        owned: bool = False,
        relay: bool = False,
        live: bool = False,
        starter: Starter | None = None,
    ) -> None:
        if backend not in get_args(Backend):
            raise UsageError(f"backend {backend!r}: expected one of {', '.join(get_args(Backend))}")
        if not allowed(deadline_s):
            raise UsageError(
                f"world deadline {deadline_s!r}: expected a number of seconds above 0 and below {LIMIT_S:g}"
            )
        self.deadline_s = deadline_s
        self._folder = folder
        self._backend = backend
        self._preload = tuple(preload)
        self._slot: Path | None = None
        if slots is not None:
            slots.mkdir(parents=True, exist_ok=True)
            self._slot = slots / "world.lock"
        self._warm: dict[int, World] = {}
        self._worlds: list[World] = []
        self._owned = owned
        self._heard = {"relay": relay, "live": live}
        self._server = starter or Server(folder, self._preload, owned=owned)

    def __enter__(self) -> WorldPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, size: int) -> World:
        """The world of `size` ranks that this pool keeps warm, the same object each time."""
        if size not in self._warm:
            self._warm[size] = self.fresh(size)
        return self._warm[size]

    def fresh(self, size: int) -> World:
        """A world of new processes, the caller's to close; the pool closes it at the latest with itself."""
        if size < 1:
            raise UsageError(f"world of {size} ranks: expected 1 or more")
        world = World(size, self.backend, self._living_server, lambda: self.deadline_s, self._slot, **self._heard)
        self._worlds.append(world)
        return world

    def lacking(self, size: int) -> str | None:
        """Why a world of `size` ranks cannot run here, or None. Waits for the server's imports where it may."""
        if reason := self._living_server().lacking(size):
            return reason
        if self._backend != "nccl" or size <= (devices := self._living_server().devices()):
            return None
        return (
            f"NCCL wants a GPU of its own for each of {size} ranks, and there are {devices}: "
            "use --backend=gloo or smaller worlds"
        )

    def backend(self, size: int) -> str:
        """The backend of worlds of `size` ranks: gloo or nccl. Raises `UsageError` where it is lacking."""
        if reason := self.lacking(size):
            raise UsageError(reason)
        if self._backend == "auto":
            return "nccl" if size <= self._living_server().devices() else "gloo"
        return self._backend

    def outputs(self) -> tuple[Output, ...]:
        """The end of what ranks have printed since the last reset."""
        return tuple(output for world in self._worlds for output in world.outputs())

    def reset(self) -> None:
        """Reset every world that was used since its last reset; all of them, then raise the first failure."""
        self._each(World.reset)

    def close(self) -> None:
        """End all ranks and the server, remove the private folder; then raise what did not end in order."""
        try:
            self._each(World.close)
        finally:
            self._worlds.clear()
            self._warm.clear()
            self._server.close()

    def _each(self, action: Callable[[World], None]) -> None:
        failures = []
        for world in self._worlds:
            try:
                action(world)
            except RankFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _living_server(self) -> Starter:
        if not self._server.alive:
            self._server.close()
            self._server = Server(self._folder, self._preload, owned=self._owned)
        return self._server
