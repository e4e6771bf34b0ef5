"""One cell of a schedule: what a rank does with one microbatch of one stage.

The text form is that of `torch.distributed.pipelining`: `{stage}{operation}{microbatch}`, as in `0F3` and `1SEND_F0`.
`1SEND_F0` on the rank of stage 1 sends stage 1's output of microbatch 0 to stage 2; `2RECV_F0` receives it there;
`2SEND_B0` sends the gradient of stage 2's input back to stage 1, where `1RECV_B0` receives it. A cell
`(1SEND_F2;1RECV_B0)BATCH` posts its operations together and waits for all of them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
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

    @property
    def sends(self) -> bool:
        """Whether the action gives a message away."""
        return self in (Op.SEND_F, Op.SEND_B)

    @property
    def forward(self) -> bool:
        """Whether the action makes, sends or receives an activation, as against a gradient."""
        return self in _FORWARD


_COMPUTE = frozenset({Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.BACKWARD})
_FORWARD = frozenset({Op.FORWARD, Op.SEND_F, Op.RECV_F})


@dataclass(frozen=True, order=False)
class Action:
    """One operation on one microbatch of one stage."""

    stage: int
    op: Op
    microbatch: int

    @property
    def peer(self) -> int:
        """Stage at the other end of a send or receive; it may lie outside the pipeline, where a schedule is wrong."""
        return self.stage + 1 if self.op.forward is self.op.sends else self.stage - 1

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


def parse_rows(texts: Iterable[Iterable[str]]) -> tuple[Row, ...]:
    """Read one row a rank, each from the texts of its cells; a `UsageError` names the rank and the column."""
    rows = []
    for rank, row in enumerate(texts):
        cells = []
        for column, text in enumerate(row):
            try:
                cells.append(parse_cell(text))
            except UsageError as error:
                raise UsageError(f"rank {rank}, column {column}: {error}") from None
        rows.append(tuple(cells))
    return tuple(rows)


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """The actions of a cell: itself, or those of a batch."""
    return cell.actions if isinstance(cell, Batch) else (cell,)


def communicates(rows: Iterable[Row]) -> bool:
    """Whether any cell sends or receives, as against a schedule that lists computation only."""
    return any(not action.op.computes for row in rows for cell in row for action in actions_of(cell))


def placement(rows: Sequence[Row]) -> dict[int, int]:
    """Rank of each stage that computes something; a rank may hold several stages.

    A stage that computes on two ranks is a `UsageError`.
    """
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            if isinstance(cell, Batch) or not cell.op.computes:
                continue
            if ranks.setdefault(cell.stage, rank) != rank:
                raise UsageError(
                    f"schedule: stage {cell.stage} computes on rank {ranks[cell.stage]} and on rank {rank}"
                )
    return ranks
