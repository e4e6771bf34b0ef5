"""A schedule as arrays: what all checks work on, at any size, without a Python object for each action."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy import uint32
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.actions import NO_MICROBATCH, Action, Batch, Cell, Op, Overlap, Row, actions_of
from invariants.schedule.compiled import available, loop
from invariants.schedule.memory import zeros

if TYPE_CHECKING:
    from invariants.schedule.computations import Computations

Ints = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]

OPS: Final = tuple(Op)
"""An operation's code is its place here."""
CODES: Final = {op: code for code, op in enumerate(OPS)}
IDLE: Final = len(OPS)
"""Code of an empty cell, which torch's CSV form keeps; it does nothing and takes no time."""
F, I, W, B = (CODES[op] for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.BACKWARD))  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = (CODES[op] for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B))
UNSHARD, RESHARD, REDUCE_GRAD = (CODES[op] for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD))

ALONE, FIRST, NEXT = 0, 1, 2
"""An action is a cell of its own, or opens a compound cell, or goes on with the one before it."""

MAX_ACTIONS: Final = 2**31 - 1
MAX_GRID: Final = 2**28
"""Largest number of stages times microbatches, at least: checks keep tables of that size."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Actions of all ranks, one rank's program after another's.

    `starts` [R+1] (int64): rank r's actions are those from `starts[r]` up to `starts[r+1]`. Of each action [A]: `op`
    (uint8, a code of `OPS`, or `IDLE`), `stage` and `microbatch` (int32, -1 where it has none), and `joint` (uint8:
    `ALONE`, `FIRST` or `NEXT`), which groups the actions of a compound cell: sends and receives that are posted as a
    batch, or computations that overlap. The arrays are not to be written to. Sizes that do not fit are a `UsageError`.
    """

    starts: NDArray[np.int64]
    op: NDArray[np.uint8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    joint: NDArray[np.uint8]

    def __post_init__(self) -> None:
        size = len(self.op)
        if {len(self.stage), len(self.microbatch), len(self.joint)} != {size}:
            raise UsageError("schedule: op, stage, microbatch and joint differ in length: expected one entry an action")
        if size > MAX_ACTIONS:
            raise UsageError(f"schedule: {size} actions: expected at most {MAX_ACTIONS}")
        starts = self.starts
        if len(starts) == 0 or starts[0] != 0 or starts[-1] != size or (np.diff(starts) < 0).any():
            raise UsageError(f"schedule: starts: expected a rising list from 0 to {size}, one entry a rank and the end")
        if self.stages * max(self.microbatches, 1) > max(MAX_GRID, 16 * size):
            sizes = f"{self.stages} stages, {self.microbatches} microbatches, {size} actions"
            raise UsageError(f"schedule: {sizes}: expected numbers that count from 0 without gaps")

    @classmethod
    def of_arrays(
        cls,
        lengths: Sequence[int] | Ints,
        op: Sequence[int] | NDArray[Any],
        stage: Sequence[int] | NDArray[Any],
        microbatch: Sequence[int] | NDArray[Any],
        joint: Sequence[int] | NDArray[Any] | None = None,
    ) -> Schedule:
        """Build one from the number of actions of each rank and the actions' columns, rank after rank."""
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        alone = np.zeros(len(op), np.uint8) if joint is None else np.asarray(joint, np.uint8)
        return cls(
            starts,
            np.asarray(op, np.uint8),
            _int32("stage", stage),
            _int32("microbatch", microbatch),
            alone,
        )

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> Schedule:
        """Build one from rows of cells, one row a rank."""
        lengths: list[int] = []
        columns: list[tuple[int, int, int, int]] = []
        for row in rows:
            before = len(columns)
            for cell in row:
                for place, action in enumerate(actions_of(cell)):
                    part = ALONE if isinstance(cell, Action) else NEXT if place else FIRST
                    columns.append((CODES[action.op], action.stage, action.microbatch, part))
            lengths.append(len(columns) - before)
        op, stage, microbatch, joint = np.array(columns, np.int64).reshape(-1, 4).T
        return cls.of_arrays(lengths, op, stage, microbatch, joint)

    def row(self, rank: int) -> Row:
        """The cells of one rank, empty ones left out."""
        begin, end = int(self.starts[rank]), int(self.starts[rank + 1])
        firsts = np.flatnonzero((self.joint[begin:end] != NEXT) & (self.op[begin:end] != IDLE)) + begin
        bounds = [*firsts.tolist(), end]
        return tuple(self.cell(*pair) for pair in pairwise(bounds))

    def cell(self, first: int, end: int) -> Cell:
        """The cell that begins with the action `first` and ends before `end`, or before an empty cell."""
        if self.joint[first] == ALONE:
            return self.action(first)
        actions = tuple(self.action(index) for index in range(first, end) if self.op[index] != IDLE)
        return Overlap(actions) if actions[0].op.computes else Batch(actions)

    def rows(self) -> tuple[Row, ...]:
        """The cells of all ranks."""
        return tuple(map(self.row, range(self.ranks)))

    def action(self, index: int) -> Action:
        """One action as an object, for a message about it; `index` counts over all ranks."""
        return Action(int(self.stage[index]), OPS[self.op[index]], int(self.microbatch[index]))

    def place(self, index: int) -> tuple[int, int]:
        """Rank of an action, and its place among that rank's actions."""
        rank = int(np.searchsorted(self.starts, index, side="right")) - 1
        return rank, index - int(self.starts[rank])

    def column(self, index: int) -> int:
        """Cell of an action in its rank's row, empty cells counted."""
        return int(np.count_nonzero(self.joint[self.starts[self.place(index)[0]] : index + 1] != NEXT)) - 1

    def kept(self, keep: Flags, ranks: Ints | None = None) -> Schedule:
        """The actions that `keep` [A] marks, in their order, on these ranks only; None: on all of them."""
        cell = np.cumsum(self.joint != NEXT)[keep]
        joint = self.joint[keep].copy()
        compound = joint != ALONE
        joint[compound] = np.where(np.diff(cell, prepend=0)[compound] > 0, FIRST, NEXT)
        lengths = np.add.reduceat(np.append(keep, False), self.starts[:-1], dtype=np.int64)
        lengths[np.diff(self.starts) == 0] = 0
        if ranks is not None:
            lengths = lengths[ranks]
        return Schedule.of_arrays(lengths, self.op[keep], self.stage[keep], self.microbatch[keep], joint)

    def __len__(self) -> int:
        """Number of actions."""
        return len(self.op)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return all(np.array_equal(mine, its) for mine, its in zip(self.columns, other.columns, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as numpy's arrays

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.starts) - 1

    @cached_property
    def stages(self) -> int:
        """Number of stages: one more than the last that occurs."""
        return int(self.stage.max(initial=-1)) + 1

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches: one more than the last that occurs."""
        return int(self.microbatch.max(initial=NO_MICROBATCH)) + 1

    @cached_property
    def rank(self) -> NDArray[np.int32]:
        """Rank of each action [A]."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.starts))

    @cached_property
    def computes(self) -> Flags:
        """Whether each action computes [A]."""
        return self.op <= B

    @cached_property
    def exchanges(self) -> Flags:
        """Whether each action sends or receives [A]."""
        return (self.op >= SEND_F) & (self.op <= RECV_B)

    @cached_property
    def communicates(self) -> bool:
        """Whether anything is sent or received, as against a schedule that lists computation only."""
        return bool(self.exchanges.any())

    @cached_property
    def placement(self) -> NDArray[np.int32]:
        """Rank of each stage [S], -1 where none computes it; a stage on two ranks is a `UsageError`."""
        homes = np.full(self.stages, -1, np.int32)
        if available():
            astray = _fill_homes(self.starts, self.op, self.stage, homes)
        else:
            computing = np.flatnonzero((self.op <= B) & (self.stage >= 0))
            stage, rank = self.stage[computing], self.rank[computing]
            homes = firsts(homes.shape, (stage,), rank)
            astray = int(np.append(computing[homes[stage] != rank], -1)[0])
        if astray >= 0:
            stage = self.stage[astray]
            ranks = f"rank {homes[stage]} and on rank {self.place(astray)[0]}"
            raise UsageError(f"schedule: stage {stage} computes on {ranks}: expected one rank a stage")
        return homes

    @cached_property
    def makers(self) -> NDArray[np.int32]:
        """Index of the action that makes each message [S, 2, M], a gradient (0) or an activation (1): the first one, -1
        where none does.
        """
        makers = zeros((self.stages, 2, max(self.microbatches, 1)), np.int32)
        makers.fill(-1)
        if available():
            _fill_makers(self.op, self.stage, self.microbatch, makers)
            return makers
        made = (self.op == F) | (self.op == B) | (self.op == I)
        where = np.flatnonzero(made & (self.stage >= 0) & (self.microbatch >= 0))
        forward = (self.op[where] == F).astype(np.intp)
        return firsts(makers.shape, (self.stage[where], forward, self.microbatch[where]), where)

    @cached_property
    def packed(self) -> Computations:
        """What it computes, in the form that is run; see `computations.computations`."""
        from invariants.schedule.computations import pack

        return pack(self)

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """All five arrays."""
        return self.starts, self.op, self.stage, self.microbatch, self.joint


@loop
def _fill_homes(
    starts: NDArray[np.int64], op: NDArray[np.uint8], stage: NDArray[np.int32], homes: NDArray[np.int32]
) -> int:
    for rank in range(len(starts) - 1):
        for action in range(starts[rank], starts[rank + 1]):
            i = uint32(action)
            here = uint32(stage[i])
            if op[i] <= B and stage[i] >= 0 and homes[here] != rank:
                if homes[here] >= 0:
                    return action
                homes[here] = rank
    return -1


@loop
def _fill_makers(
    op: NDArray[np.uint8], stage: NDArray[np.int32], microbatch: NDArray[np.int32], makers: NDArray[np.int32]
) -> None:
    for i in range(len(op) - 1, -1, -1):
        if (op[i] == F or op[i] == I or op[i] == B) and stage[i] >= 0 and microbatch[i] >= 0:
            makers[stage[i], 1 if op[i] == F else 0, microbatch[i]] = i


def firsts(shape: tuple[int, ...], places: tuple[NDArray[Any], ...], values: NDArray[Any]) -> NDArray[np.int32]:
    """The smallest of the values that belong to each place; -1 where none does.

    Writing them in turn would not do: where a place repeats, numpy does not say which value stays.
    """
    found = np.full(shape, MAX_ACTIONS, np.int32)
    np.minimum.at(found, places, values.astype(np.int32))
    found[found == MAX_ACTIONS] = -1
    return found


def as_schedule(rows: Schedule | Iterable[Row]) -> Schedule:
    """The schedule itself, or the one that these rows make."""
    return rows if isinstance(rows, Schedule) else Schedule.of_rows(rows)


def _int32(what: str, numbers: Sequence[int] | NDArray[Any]) -> NDArray[np.int32]:
    wide = np.asarray(numbers)
    if wide.dtype != np.int32 and wide.size and not (wide.min() >= NO_MICROBATCH and wide.max() <= MAX_ACTIONS):
        raise UsageError(f"schedule: {what} {wide.min()} to {wide.max()}: expected -1 to {MAX_ACTIONS}")
    return wide.astype(np.int32, copy=False)
