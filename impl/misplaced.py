"""Wrong schedules for `faults.py`, planted as the functions of `plants.py` are."""

from __future__ import annotations

from typing import Any

from invariants.schedule.actions import Action, Op
from invariants.schedule.table import Schedule


def parameter_counts(gpt: Any) -> tuple[float, ...]:
    """Parameters of each layer: tokens and positions, blocks of attention and two linear layers, the head."""
    block = 12 * gpt.width**2 + 13 * gpt.width
    head = (gpt.vocabulary + 2) * gpt.width
    return ((gpt.vocabulary + gpt.sequence) * gpt.width, *[block] * gpt.layers, head)


def serialised(generate: Any) -> Any:
    """Each stage finishes a microbatch before it starts the next."""

    def rows(name: str, stages: int, microbatches: int) -> Any:
        pairs = []
        for row in generate(name, stages, microbatches).rows():
            by_microbatch = sorted(range(len(row)), key=lambda column: (row[column].microbatch, column))
            pairs.append(tuple(row[column] for column in by_microbatch))
        return tuple(pairs)

    return rows


def gpipe_for_all(generate: Any) -> Any:
    """All forwards first, whatever was asked for."""
    return lambda _name, stages, microbatches: generate("gpipe", stages, microbatches).rows()


def forwarded_twice(lower: Any) -> Any:
    """The last stage computes the forward of its first microbatch twice."""

    def rows(schedule: Any, how: str) -> Any:
        *others, last = lower(schedule, how).rows()
        again = last.index(Action(len(others), Op.FORWARD, 0))
        return Schedule.of_rows([*others, (*last[:again], last[again], *last[again:])])

    return rows


def received_after_use(lower: Any) -> Any:
    """Each stage receives a gradient only after the backward that needs it."""

    def rows(schedule: Any, how: str) -> Any:
        moved = []
        for row in lower(schedule, how).rows():
            cells = list(row)
            for cell in row:
                if cell.op is Op.RECV_B:
                    cells.remove(cell)
                    cells.insert(1 + cells.index(Action(cell.stage, Op.BACKWARD, cell.microbatch)), cell)
            moved.append(tuple(cells))
        return Schedule.of_rows(moved)

    return rows
