"""Hypothesis strategies that draw schedules: right ones, and right ones with one thing changed.

For those who test what judges a schedule, or what runs one. Examples shrink towards one rank, one microbatch and few
cells. Hypothesis is imported here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from invariants.schedule.actions import NO_MICROBATCH, Action, Cell, Op, Overlap
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.table import ALONE, IDLE, NEXT, Schedule

MUTATIONS: Final = ("swap", "drop", "duplicate", "misplace", "cross")
"""Two cells of a rank change places; a cell is gone, or there twice, or on another rank; two sends to one rank change
places."""


class Mutated(NamedTuple):
    """A schedule, what was changed in words, and the right schedule that it was."""

    schedule: Schedule
    change: str
    right: Schedule


@st.composite
def schedules(
    draw: st.DrawFn,
    *,
    max_ranks: int = 3,
    max_microbatches: int = 3,
    max_virtual: int = 2,
    lowered: bool | None = None,
) -> Schedule:
    """Right schedules: everything is done once, in an order that data allows, so that computation ends.

    A family, or any order, with at most `max_virtual` stages a rank, on any ranks in any order; some rank may hold
    nothing. Backwards are whole or split, computations may overlap, some cells may be empty. `lowered`: with sends and
    receives or without, by any lowering; None: either. Most lowerings promise neither to end nor to receive
    messages in the order in which they are sent: `order.evaluate` decides.
    """
    ranks, microbatches = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    names = [
        name
        for name, family in FAMILIES.items()
        if family.least * ranks <= microbatches and (family.virtual or 1) <= max_virtual
    ]
    if draw(st.booleans()):
        slots = draw(st.permutations([*range(ranks)] * max_virtual))
        schedule = draw(_orders(ranks, slots[: draw(st.integers(1, len(slots)))], microbatches))
    else:
        name = draw(st.sampled_from(names))
        virtual = 1 if FAMILIES[name].virtual else draw(st.integers(1, max_virtual))
        schedule = generate(name, ranks, microbatches, virtual)
    if draw(st.booleans()) if lowered is None else lowered:
        schedule = lower(schedule, draw(st.sampled_from([*LOWERINGS])))
    return draw(_with_empty_cells(schedule))


@st.composite
def _orders(draw: st.DrawFn, ranks: int, homes: Sequence[int], microbatches: int) -> Schedule:
    """One computation after the other, each one that can run now; a rank's row is its part of that.

    `homes`: the rank of each stage.
    """
    stages = len(homes)
    rows: list[list[Cell]] = [[] for _ in range(ranks)]
    done = dict.fromkeys(range(microbatches), 0)
    weights: list[Action] = []
    last = -1
    # One draw for all choices, a byte each, is many times as fast as a draw for each.
    for byte in draw(st.binary(min_size=3 * stages * microbatches, max_size=3 * stages * microbatches)):
        ready = [*(Action(*_next(done[i], stages), i) for i in done if done[i] < 2 * stages), *weights]
        if not ready:
            break
        action, splits, overlaps = ready[(byte >> 2) % len(ready)], byte & 1, byte & 2
        if action.op is Op.WEIGHT_GRADIENT:
            weights.remove(action)
        else:
            done[action.microbatch] += 1
        if action.op is Op.BACKWARD and splits:
            action = Action(action.stage, Op.INPUT_GRADIENT, action.microbatch)
            weights.append(Action(action.stage, Op.WEIGHT_GRADIENT, action.microbatch))
        rank = homes[action.stage]
        before = rows[rank][-1] if rank == last else None
        # Nothing ran between the two, so that neither waits for what the other makes.
        if isinstance(before, Action) and overlaps and _overlap(before, action):
            rows[rank][-1] = Overlap((before, action))
        else:
            rows[rank].append(action)
        last = rank
    return Schedule.of_rows(map(tuple, rows))


def _next(done: int, stages: int) -> tuple[int, Op]:
    """What comes after so many computations of a microbatch."""
    return (done, Op.FORWARD) if done < stages else (2 * stages - 1 - done, Op.BACKWARD)


def _overlap(before: Action, action: Action) -> bool:
    """Whether one goes forward and the other back, on different microbatches."""
    ops = {before.op, action.op}
    return Op.FORWARD in ops and bool(ops & {Op.BACKWARD, Op.INPUT_GRADIENT}) and before.microbatch != action.microbatch


@st.composite
def _with_empty_cells(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    starts, columns = schedule.starts.copy(), [*schedule.columns[1:]]
    for rank in draw(st.lists(st.integers(0, schedule.ranks - 1), max_size=2)):
        start, end = map(int, starts[rank : rank + 2])
        at = draw(st.sampled_from([*(index for index in range(start, end) if columns[-1][index] != NEXT), end]))
        empty = (IDLE, NO_MICROBATCH, NO_MICROBATCH, ALONE)
        columns = [np.insert(column, at, value) for column, value in zip(columns, empty, strict=True)]
        starts[rank + 1 :] += 1
    return Schedule(starts, *columns)


@st.composite
def mutated_schedules(
    draw: st.DrawFn,
    mutations: Sequence[str] = MUTATIONS,
    *,
    max_ranks: int = 3,
    max_microbatches: int = 3,
    max_virtual: int = 2,
    lowered: bool | None = None,
) -> Mutated:
    """Right schedules of `schedules`, without empty cells, with one of `mutations` done to them.

    What comes out may still be right, where two cells that changed places do not depend on each other.
    """
    sizes = {"max_ranks": max_ranks, "max_microbatches": max_microbatches, "max_virtual": max_virtual}
    right = Schedule.of_rows(draw(schedules(**sizes, lowered=lowered)).rows())
    rows = [[*row] for row in right.rows()]
    places = {mutation: _places(mutation, rows, right.placement.tolist()) for mutation in mutations}
    assume(any(places.values()))
    mutation = draw(st.sampled_from([mutation for mutation in mutations if places[mutation]]))
    rank, column, other = draw(st.sampled_from(places[mutation]))
    row, cell = rows[rank], rows[rank][column]
    change = f"{mutation}: {cell} on rank {rank}, column {column}"
    if mutation in ("swap", "cross"):
        change += f", and {row[other]}, column {other}"
        row[column], row[other] = row[other], cell
    elif mutation == "drop":
        del row[column]
    else:
        at = draw(st.integers(0, len(rows[other])))
        change += f", to rank {other}, column {at}"
        rows[other].insert(at, cell)
        if mutation == "misplace":
            del row[column]
    return Mutated(Schedule.of_rows(map(tuple, rows)), change, right)


def _places(mutation: str, rows: Sequence[Sequence[Cell]], homes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(rank, column, the other column or rank) of all that this can be done to."""
    if mutation in ("swap", "cross"):
        return [
            (rank, one, other)
            for rank, row in enumerate(rows)
            for one, other in combinations(range(len(row)), 2)
            if row[one] != row[other] and (mutation == "swap" or _one_way(row[one], row[other], homes))
        ]
    others = range(len(rows))
    return [
        (rank, column, other)
        for rank, row in enumerate(rows)
        for column in range(len(row))
        for other in others
        if (other != rank) is (mutation == "misplace")
    ]


def _one_way(one: Cell, other: Cell, homes: Sequence[int]) -> bool:
    """Whether both are sends to one rank."""
    sends = [cell for cell in (one, other) if isinstance(cell, Action) and cell.op.sends]
    return len(sends) == 2 and homes[sends[0].peer] == homes[sends[1].peer]
