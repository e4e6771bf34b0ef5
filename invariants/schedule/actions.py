"""One cell of a schedule: what a rank does with one microbatch of one stage.

The text form is that of `torch.distributed.pipelining`: `{stage}{operation}{microbatch}`, as in `0F3` and `1SEND_F0`.
`1SEND_F0` on the rank of stage 1 sends stage 1's output of microbatch 0 to stage 2; `2RECV_F0` receives it there;
`2SEND_B0` sends the gradient of stage 2's input back to stage 1, where `1RECV_B0` receives it. `0UNSHARD`, `0RESHARD`
and `0REDUCE_GRAD` gather, free and reduce the parameters of a stage; they belong to no microbatch. A cell
`(1SEND_F2;1RECV_B0)BATCH` posts its operations together and waits for all of them; `(1F1;2B0)OVERLAP_F_B` computes both
at once.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

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
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    @property
    def computes(self) -> bool:
        """Whether the action computes on a microbatch, as against moving something."""
        return self in _COMPUTE

    @property
    def exchanges(self) -> bool:
        """Whether the action is a send or a receive between two stages."""
        return self in _EXCHANGES

    @property
    def shards(self) -> bool:
        """Whether the action moves a stage's parameters or gradients, and so belongs to no microbatch."""
        return self in _SHARDS

    @property
    def sends(self) -> bool:
        """Whether the action gives a message away."""
        return self in (Op.SEND_F, Op.SEND_B)

    @property
    def forward(self) -> bool:
        """Whether the action makes, sends or receives an activation, as against a gradient."""
        return self in _FORWARD


_COMPUTE = frozenset({Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.BACKWARD})
_EXCHANGES = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
_SHARDS = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
_FORWARD = frozenset({Op.FORWARD, Op.SEND_F, Op.RECV_F})
NO_MICROBATCH: Final = -1
LARGEST: Final = 2**31 - 1
"""Largest number of a stage or a microbatch."""
BLANKS: Final = " \t"
"""What may stand around a cell, and around each part of a compound one, as `str.strip` in torch's reader allows."""


@dataclass(frozen=True, order=False)
class Action:
    """One operation on one microbatch of one stage; `NO_MICROBATCH` where the operation has none."""

    stage: int
    op: Op
    microbatch: int = NO_MICROBATCH

    @property
    def peer(self) -> int:
        """Stage at the other end of a send or receive; it may lie outside the pipeline, where a schedule is wrong."""
        return self.stage + 1 if self.op.forward is self.op.sends else self.stage - 1

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == NO_MICROBATCH else self.microbatch
        return f"{self.stage}{self.op.value}{microbatch}"


@dataclass(frozen=True)
class Batch:
    """Communications that are posted together; the cell is done when all of them are."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})BATCH"


@dataclass(frozen=True)
class Overlap:
    """Computations that run at the same time; the cell is done when all of them are."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})OVERLAP_F_B"


Cell = Action | Batch | Overlap
Row = tuple[Cell, ...]
"""What one rank does, in program order."""

_ACTION = re.compile(
    r"(0|[1-9][0-9]*)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|I|W|B)(0|[1-9][0-9]*|)"
)
_COMPOUND = re.compile(r"\(([^()]+)\)(BATCH|OVERLAP_F_B)")


def parse_cell(text: str) -> Cell:
    """Read one cell; anything but its exact text form, with blanks around it or not, is a `UsageError`.

    Numbers are decimal without leading zeros, so that each cell has one text.
    """
    stripped = text.strip(BLANKS)
    compound = _COMPOUND.fullmatch(stripped)
    if compound is None:
        return _parse_action(stripped, text)
    actions = tuple(_parse_action(part.strip(BLANKS), text) for part in compound[1].split(";"))
    if compound[2] == "BATCH":
        if not all(action.op.exchanges for action in actions):
            raise UsageError(f"schedule cell {text!r}: a BATCH holds sends and receives only")
        return Batch(actions)
    if not all(action.op.computes for action in actions):
        raise UsageError(f"schedule cell {text!r}: an OVERLAP_F_B holds computations only")
    return Overlap(actions)


def _parse_action(part: str, text: str) -> Action:
    match = _ACTION.fullmatch(part)
    if match is None:
        allowed = ", ".join(op.value for op in Op)
        raise UsageError(f"schedule cell {text!r}: expected {{stage}}{{op}}{{microbatch}} with op one of {allowed}")
    numbers = [number for number in (match[1], match[3]) if number]
    if any(len(number) > len(str(LARGEST)) or int(number) > LARGEST for number in numbers):
        raise UsageError(f"schedule cell {text!r}: expected numbers up to {LARGEST}")
    op = Op(match[2])
    if op.shards == bool(match[3]):
        expected = "no microbatch" if op.shards else "a microbatch"
        raise UsageError(f"schedule cell {text!r}: expected {expected} after {op.value}")
    return Action(int(match[1]), op, int(match[3] or NO_MICROBATCH))


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
    """The actions of a cell: itself, or those of a compound."""
    return (cell,) if isinstance(cell, Action) else cell.actions
