"""How a call on a world fails: one error, the rank that began it first, what followed from it behind."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from invariants.errors import WorldError
from invariants.world.output import Output

Kind = Literal["raised", "died", "deadlock", "deadline", "stopped"]
"""`stopped`: still at work when the world was ended because of another rank."""

_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "remote process exited",
)


@dataclass(frozen=True)
class RankFailure:
    """What happened to one rank.

    `type_name` is the qualified name of the exception, or the signal or exit status of a dead process. `text` is the
    traceback of a `raised`, the last lines of standard error of a `died`, the Python stack of the others. `operations`
    is what the rank communicated last, the latest at the end.
    """

    rank: int
    kind: Kind
    type_name: str
    message: str
    text: str
    operations: tuple[str, ...] = ()

    @property
    def consequence(self) -> bool:
        """Whether another rank's failure, or the end of the world, explains this one."""
        return self.kind == "stopped" or (
            self.kind == "raised" and any(known in self.message for known in _CONSEQUENCES)
        )

    @property
    def headline(self) -> str:
        """One line: which rank, and what."""
        if self.kind == "raised":
            return f"rank {self.rank} raised {self.type_name}: {self.message}".splitlines()[0]
        if self.kind == "died":
            return f"rank {self.rank} died: {self.type_name}"
        return f"rank {self.rank} {self.message}"

    @classmethod
    def died(cls, rank: int, status: int | str, stderr: str) -> RankFailure:
        """From `status`: an exit status, minus the number of the signal that ended the process, or words."""
        names = {number.value: number.name for number in signal.Signals}
        if isinstance(status, str):
            name = status
        else:
            name = f"killed by {names.get(-status, f'signal {-status}')}" if status < 0 else f"exit status {status}"
        return cls(rank, "died", name, "", stderr or "(nothing on its standard error)")


class RankFailed(WorldError):
    """A call on a world failed; `failures` has the origin first. The world's processes are gone.

    `outputs` is what the `blamed` ranks had printed, as far as it is at hand. `mismatches` tells, a line each, where
    operations that both sides had posted do not fit each other: gloo, which does not look, may have died of that.
    """

    def __init__(self, size: int, failures: Iterable[RankFailure], mismatches: Iterable[str] = ()) -> None:
        # Stable: within a class, the order of arrival.
        self.failures = tuple(sorted(failures, key=_order))
        if self.failures[0].consequence:
            # Nobody failed of itself: who is still at work has kept the others waiting until their backend gave up.
            self.failures = tuple(sorted(self.failures, key=lambda failure: failure.kind != "stopped"))
        self.size = size
        self.mismatches = tuple(mismatches)
        self.outputs: tuple[Output, ...] = ()
        super().__init__(str(self))

    @property
    def blamed(self) -> tuple[int, ...]:
        """Ranks whose failure no other's explains; the first, where there are none."""
        return tuple(failure.rank for failure in self.failures if not failure.consequence) or (self.failures[0].rank,)

    def __str__(self) -> str:
        first, *others = self.failures
        headline = f"{first.headline} (world of {self.size}){self._finished(first)}"
        disagree = [f"the ranks disagree: {mismatch}" for mismatch in self.mismatches]
        deadlock = self._deadlock()
        parts = [*deadlock, *disagree, "", headline] if deadlock else [headline, *disagree]
        parts.append(_body(first))
        for other in others:
            label = "then" if other.consequence else "and"
            parts += ["", f"{label}: {other.headline}", _body(other)]
        return "\n".join(parts)

    def _deadlock(self) -> list[str]:
        """All its sentences together, before the stacks."""
        stuck = [failure for failure in self.failures if failure.kind == "deadlock"]
        if not stuck:
            return []
        ring = next((failure.type_name for failure in stuck if failure.type_name), "")
        how = f"ranks {ring} wait for each other" if ring else "nobody is left to do what is waited for"
        return [f"deadlock: {how}", *(f"  {failure.headline}" for failure in stuck)]

    def _finished(self, first: RankFailure) -> str:
        """Who had left, where a rank waited for what nobody sent."""
        gone = sorted(set(range(self.size)) - {failure.rank for failure in self.failures})
        if not gone or not (first.consequence or first.kind == "deadline"):
            return ""
        return f"; {'rank' if len(gone) == 1 else 'ranks'} {', '.join(map(str, gone))} had finished by then"

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, tuple[RankFailure, ...], tuple[str, ...]]]:
        return RankFailed, (self.size, self.failures, self.mismatches)


def _body(failure: RankFailure) -> str:
    last = [f"last operations of rank {failure.rank}:", *(f"  {operation}" for operation in failure.operations)]
    return "\n".join([failure.text.rstrip(), *(last if failure.operations else [])])


def _order(failure: RankFailure) -> tuple[bool, bool]:
    return failure.consequence, failure.kind == "deadline"
