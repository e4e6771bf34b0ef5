"""One cell of a schedule: what a rank does with one microbatch of one stage.

The text form is that of `torch.distributed.pipelining`: `{stage}{operation}{microbatch}`, as in `0F3` and `1SEND_F0`.
`1SEND_F0` on the rank of stage 1 sends stage 1's output of microbatch 0 to stage 2; `2RECV_F0` receives it there;
`2SEND_B0` sends the gradient of stage 2's input back to stage 1, where `1RECV_B0` receives it. A cell
`(1SEND_F2;1RECV_B0)BATCH` posts its operations together and waits for all of them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from invariants.errors import UsageError


class Op(enum.Enum):
    """What an action does; the value is its text."""

    FORWARD = "F"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def computes(self) -> bool:
        """Whether the action occupies the device, as against the link."""
        return self in _COMPUTE


_COMPUTE = frozenset({Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.BACKWARD})


@dataclass(frozen=True, order=False)
class Action:
    """One operation on one microbatch of one stage."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


@dataclass(frozen=True)
class Batch:
    """Communications that are posted together; the cell is done when all of them are."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})BATCH"


Cell = Action | Batch
Row = tuple[Cell, ...]
"""What one rank does, in program order."""

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)(\d+)")
_BATCH = re.compile(r"\(([^()]+)\)BATCH")


def parse_cell(text: str) -> Cell:
    """Read one cell; anything but its exact text form is a `UsageError`."""
    stripped = text.strip()
    if batch := _BATCH.fullmatch(stripped):
        actions = tuple(_parse_action(part.strip(), text) for part in batch[1].split(";"))
        if any(action.op.computes for action in actions):
            raise UsageError(f"schedule cell {text!r}: a BATCH holds sends and receives only")
        return Batch(actions)
    return _parse_action(stripped, text)


def _parse_action(part: str, text: str) -> Action:
    match = _ACTION.fullmatch(part)
    if match is None:
        allowed = ", ".join(op.value for op in Op)
        raise UsageError(f"schedule cell {text!r}: expected {{stage}}{{op}}{{microbatch}} with op one of {allowed}")
    return Action(int(match[1]), Op(match[2]), int(match[3]))
