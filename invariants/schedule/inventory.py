"""Where every action of a schedule is, and what of it is wrong in which place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Op, Row
from invariants.schedule.compiled import available, loop
from invariants.schedule.computations import check_grid
from invariants.schedule.flawless import flawless
from invariants.schedule.table import (
    CODES,
    IDLE,
    NEXT,
    OPS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    F,
    Flags,
    I,
    Schedule,
    W,
    as_schedule,
    firsts,
)

_KINDS: Final = RECV_B + 1
PARTNERS: Final = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}
"""Code of the other end of a send or receive, and how far its stage is."""


class Stock(NamedTuple):
    """Where everything is, for S stages and M microbatches.

    `first` [8, S, M]: index of the first action of each kind (its code: F to RECV_B), -1 where there is none; `home`
    [S]: rank of the first computation of each stage, -1 where there is none. `outside`, `inside`, `strays`: numbers of
    actions that are out of range, that are in range, and that are on another rank than their stage's home.
    """

    first: NDArray[np.int32]
    home: NDArray[np.int32]
    outside: int
    inside: int
    strays: int


@dataclass(frozen=True)
class Inventory:
    """A schedule that is meant to have so many stages and microbatches, and where everything is in it."""

    schedule: Schedule
    stages: int
    microbatches: int

    @classmethod
    def of(cls, schedule: Schedule | Sequence[Row], stages: int, microbatches: int) -> Inventory:
        """Take stock; a number below 0, and more pairs of a stage and a microbatch than actions can fill, by far, are a
        `UsageError`: the tables have an entry for each.
        """
        for label, size in (("stages", stages), ("microbatches", microbatches)):
            if size < 0:
                raise UsageError(f"schedule: {label}={size}: expected 0 or more")
        table = as_schedule(schedule)
        check_grid(stages, microbatches, len(table))
        return cls(table, stages, microbatches)

    @cached_property
    def flawless(self) -> bool:
        """Whether it is certain that nothing is wrong, so that stock need not be taken."""
        return flawless(self.schedule, self.stages, self.microbatches)

    @cached_property
    def stock(self) -> Stock:
        """Where everything is."""
        table = self.schedule
        first = np.full((_KINDS, self.stages, self.microbatches), -1, np.int32)
        home = np.full(self.stages, -1, np.int32)
        count = _count_loop if available() else _count
        return Stock(first, home, *count(table.starts, table.op, table.stage, table.microbatch, first, home))

    @property
    def first(self) -> NDArray[np.int32]:
        """Index of the first action of each kind, see `Stock`."""
        return self.stock.first

    @property
    def home(self) -> NDArray[np.int32]:
        """Rank of each stage, see `Stock`."""
        return self.stock.home

    @cached_property
    def gradient(self) -> NDArray[np.int32]:
        """Index of the first action that makes the gradient of each stage's input [S, M]: B, or I; -1: none."""
        gradient: NDArray[np.int32] = np.where(self.first[B] >= 0, self.first[B], self.first[I])
        return gradient

    @cached_property
    def cell(self) -> NDArray[np.int64] | None:
        """Cell of each action [A], counted over all ranks; None where each action is a cell."""
        return np.cumsum(self.schedule.joint != NEXT) if self.schedule.joint.any() else None

    def out_of_range(self) -> Iterator[str]:
        """Stages and microbatches that should not exist."""
        if not self.stock.outside:
            return
        schedule, (_, stages, microbatches) = self.schedule, self.first.shape
        alone = schedule.op >= UNSHARD
        wrong = (schedule.stage < 0) | (schedule.stage >= stages) | (self._peers() < 0) | (self._peers() >= stages)
        wrong |= ~alone & ((schedule.microbatch < 0) | (schedule.microbatch >= microbatches))
        for index in map(int, np.flatnonzero(wrong & (schedule.op != IDLE))):
            action = schedule.action(index)
            if action.stage not in range(stages):
                yield f"{self._at(index)}: there is no stage {action.stage}"
            elif not action.op.shards and action.microbatch not in range(microbatches):
                yield f"{self._at(index)}: there is no microbatch {action.microbatch}"
            else:
                yield f"{self._at(index)}: there is no stage {action.peer}"

    def repeated(self) -> Iterator[str]:
        """What is done more than once."""
        if self.stock.inside == np.count_nonzero(self.first >= 0):
            return
        schedule, (_, stages, microbatches) = self.schedule, self.first.shape
        here = np.flatnonzero(schedule.op < _KINDS)
        stage, microbatch = schedule.stage[here], schedule.microbatch[here]
        fits = (stage >= 0) & (stage < stages) & (microbatch >= 0) & (microbatch < microbatches)
        here, stage, microbatch = here[fits], stage[fits], microbatch[fits]
        again = here[self.first[schedule.op[here], stage, microbatch] != here]
        places: dict[Action, list[int]] = defaultdict(list)
        for index in map(int, again):
            places[schedule.action(index)].append(index)
        for action, others in places.items():
            start = int(self.first[CODES[action.op], action.stage, action.microbatch])
            where = "; ".join(map(self._place, (start, *others)))
            yield f"{action} occurs {1 + len(others)} times: {where}"

    def astray(self) -> Iterator[str]:
        """What is on another rank than the first computation of its stage."""
        if not self.stock.strays:
            return
        schedule = self.schedule
        here = np.flatnonzero((schedule.op != IDLE) & (schedule.stage >= 0) & (schedule.stage < len(self.home)))
        homes = self.home[schedule.stage[here]]
        for index in map(int, here[(homes >= 0) & (homes != schedule.rank[here])]):
            stage = schedule.stage[index]
            yield f"{self._at(index)}: stage {stage} computes on rank {self.home[stage]}"

    def computations(self) -> Iterator[str]:
        """F, then B, or I and W."""
        has = self.first[: B + 1] >= 0
        split = has[I] | has[W]
        for lacks, op in (
            (~has[F], Op.FORWARD),
            (~has[B] & ~split, Op.BACKWARD),
            (split & ~has[B] & ~has[I], Op.INPUT_GRADIENT),
            (split & ~has[B] & ~has[W], Op.WEIGHT_GRADIENT),
        ):
            for stage, microbatch in _where(lacks):
                yield f"{Action(stage, op, microbatch)} is missing"
        for stage, microbatch in _where(has[B] & split):
            again = self.first[I if has[I, stage, microbatch] else W, stage, microbatch]
            yield f"{self._at(self.first[B, stage, microbatch])} is done again by {self._at(again)}"

    def unreceived(self, receive: int, first_stage: int) -> Iterator[str]:
        """What a computation needs of another rank and does not receive."""
        made, step = (self.first[F], -1) if receive == RECV_F else (self.gradient, 1)
        here = slice(1, None) if step < 0 else slice(first_stage, max(len(self.home) - 1, first_stage))
        there = slice(0, -1) if step < 0 else slice(here.start + 1, None)
        lacks = (made[here] >= 0) & (made[there] >= 0) & (self.first[receive][here] < 0)
        lacks &= (self.home[here] != self.home[there])[:, None]
        for row, microbatch in _where(lacks):
            stage = row + here.start
            needs, source = made[stage, microbatch], made[stage + step, microbatch]
            received = Action(stage, Op.RECV_F if step < 0 else Op.RECV_B, microbatch)
            maker = f"{self.schedule.action(source)} of rank {self.schedule.place(source)[0]}"
            yield f"{self._at(needs)} needs {maker}: {received} is missing"

    def unpaired(self, code: int) -> Iterator[str]:
        """Sends without a receive, or receives without a send."""
        other, step = PARTNERS[code]
        here, there = (slice(0, -1), slice(1, None)) if step > 0 else (slice(1, None), slice(0, -1))
        for row, microbatch in _where((self.first[code][here] >= 0) & (self.first[other][there] < 0)):
            stage = row + here.start
            partner = Action(stage + step, OPS[other], microbatch)
            yield f"{self._at(self.first[code, stage, microbatch])} has no {partner}"

    def late(self, earlier: NDArray[np.int32], later: NDArray[np.int32]) -> Iterator[str]:
        """Complain where both are there, on one rank, and `later` does not come after `earlier`."""
        before = earlier > later if self.cell is None else self.cell[earlier] >= self.cell[later]
        wrong = before & (earlier >= 0) & (later >= 0)
        for first, second in zip(earlier[wrong], later[wrong], strict=True):
            if self.schedule.place(first)[0] == self.schedule.place(second)[0]:
                together = self.cell is not None and self.cell[first] == self.cell[second]
                yield f"{self._at(second)} {'is done together with' if together else 'comes before'} {self._at(first)}"

    def _peers(self) -> NDArray[np.int32]:
        """Stage at the other end of each send and receive; its own for other actions."""
        op = self.schedule.op
        up, down = (op == SEND_F) | (op == RECV_B), (op == RECV_F) | (op == SEND_B)
        peers: NDArray[np.int32] = self.schedule.stage + up.astype(np.int32) - down.astype(np.int32)
        return peers

    def _place(self, index: int) -> str:
        return f"rank {self.schedule.place(index)[0]}, column {self.schedule.column(index)}"

    def _at(self, index: int) -> str:
        return f"{self.schedule.action(index)} at {self._place(index)}"


def _where(mask: Flags) -> Iterator[tuple[int, int]]:
    for place in np.flatnonzero(mask).tolist():
        yield divmod(place, mask.shape[1])


def _count(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    first: NDArray[np.int32],
    home: NDArray[np.int32],
) -> tuple[int, int, int]:
    _, stages, microbatches = first.shape
    rank = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
    staged = (stage >= 0) & (stage < stages)
    computing = np.flatnonzero(staged & (op <= B))
    home[:] = firsts(home.shape, (stage[computing],), rank[computing])
    up, down = (op == SEND_F) | (op == RECV_B), (op == RECV_F) | (op == SEND_B)
    peer = stage + up - down
    fits = staged & (peer >= 0) & (peer < stages)
    fits &= (op >= UNSHARD) | ((microbatch >= 0) & (microbatch < microbatches))
    inside = np.flatnonzero(staged & (op < UNSHARD) & (microbatch >= 0) & (microbatch < microbatches))
    first[:] = firsts(first.shape, (op[inside], stage[inside], microbatch[inside]), inside)
    homes = home[np.where(staged, stage, 0)] if stages else np.full(len(op), -1)
    strays = np.count_nonzero(staged & (op != IDLE) & (homes >= 0) & (homes != rank))
    return int(np.count_nonzero(~fits & (op != IDLE))), len(inside), int(strays)


@loop
def _count_loop(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    first: NDArray[np.int32],
    home: NDArray[np.int32],
) -> tuple[int, int, int]:
    stages, microbatches = first.shape[1], first.shape[2]
    outside, inside, strays = 0, 0, 0
    for rank in range(len(starts) - 1):
        for i in range(starts[rank], starts[rank + 1]):
            if op[i] <= B and 0 <= stage[i] < stages and home[stage[i]] < 0:
                home[stage[i]] = rank
    for rank in range(len(starts) - 1):
        for i in range(starts[rank], starts[rank + 1]):
            if op[i] == IDLE:
                continue
            if stage[i] < 0 or stage[i] >= stages:
                outside += 1
                continue
            if home[stage[i]] >= 0 and home[stage[i]] != rank:
                strays += 1
            if op[i] >= UNSHARD:
                continue
            numbered = 0 <= microbatch[i] < microbatches
            peer = stage[i]
            if op[i] == SEND_F or op[i] == RECV_B:
                peer += 1
            elif op[i] == RECV_F or op[i] == SEND_B:
                peer -= 1
            if not numbered or peer < 0 or peer >= stages:
                outside += 1
            if numbered:
                inside += 1
                if first[op[i], stage[i], microbatch[i]] < 0:
                    first[op[i], stage[i], microbatch[i]] = i
    return outside, inside, strays
