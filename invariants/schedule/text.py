r"""Schedules as text: the CSV that `torch.distributed.pipelining` dumps and loads, in both of its forms.

A row a rank, rows of any length, a cell an action (`actions` has the grammar). The compute-only form holds `0F0`, `0B0`
and compound cells `(1F1;2B0)OVERLAP_F_B`; the lowered form adds sends, receives, `UNSHARD`, `RESHARD` and
`REDUCE_GRAD`. An empty cell is a step at which the rank idles. Source: `PipelineScheduleMulti._dump_csv` and
`_PipelineScheduleRuntime._load_csv` in `torch/distributed/pipelining/schedules.py`, torch 2.13.

Reading is stricter than torch's, whose expression is not anchored: it takes `0F0junk` for `0F0`. What torch writes is
kept byte for byte: rows end in `\r\n`, no blanks, no quotes but for `""`, by which `csv` tells a row that is one empty
cell from a row without cells. What is read as well, and not kept: rows that end in `\n`, a last row without an end,
blanks around cells and around the parts of a compound, `""` for an empty cell anywhere. A blank line is a rank that
does nothing; no line is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from os import PathLike
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.actions import BLANKS, LARGEST, NO_MICROBATCH, Action, parse_cell
from invariants.schedule.table import ALONE, CODES, FIRST, IDLE, NEXT, OPS, UNSHARD, Ints, Schedule

_SHAPE: Final = str.maketrans("23456789", "11111111")
_NUMBERS: Final = str.maketrans({chr(code): " " for code in range(128) if not chr(code).isdigit()})
_EMPTY: Final = ("", '""')
_OPS: Final = (*(op.value for op in OPS), "")


def read_csv(path: str | PathLike[str]) -> Schedule:
    """The schedule in a CSV file.

    A file that cannot be read, is empty or is not UTF-8, and a cell that is not exact or holds a number beyond
    2**31 - 1 are each a `UsageError`, which names the file, the row, the column, the text and what is allowed.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: expected a schedule as a CSV file") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        row = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, row {row}: byte {content[error.start]:#04x} is not UTF-8: expected text") from None
    return parse_csv(text, str(path))


def parse_csv(text: str, name: str) -> Schedule:
    """The schedule that `text` holds; `name` says in errors where it is from. Errors are those of `read_csv`."""
    if not text:
        raise UsageError(f"{name}: empty: expected one row a rank")
    rows = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    # A cell is right or wrong by its shape, in which each digit from 1 to 9 is 1: a few thousand shapes are parsed
    # instead of each cell, and numpy reads the numbers of all cells at once.
    shapes = [row.translate(_SHAPE).split(",") if row else [] for row in rows]
    every = list(chain.from_iterable(shapes))
    known = {shape: index for index, shape in enumerate(dict.fromkeys(every))}
    try:
        cells = [_parts(shape) for shape in known]
    except UsageError:
        _refuse(rows, name)
    op, joint, ends = _expand(cells, np.fromiter(map(known.__getitem__, every), np.int64, len(every)))
    numbers = np.full((len(op), 2), NO_MICROBATCH, np.int64)
    numbers[np.stack([op != IDLE, op < UNSHARD], axis=1)] = np.fromstring(
        " ".join(rows).translate(_NUMBERS).strip(), np.int64, sep=" "
    )
    if numbers.max(initial=0) > LARGEST:
        _refuse(rows, name)
    stage, microbatch = np.ascontiguousarray(numbers.T, np.int32)
    try:
        return Schedule(ends[np.cumsum([0, *map(len, shapes)])], op, stage, microbatch, joint)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def format_csv(schedule: Schedule) -> str:
    """The text of a schedule, as torch writes it."""
    joint = schedule.joint
    # The next rank's first action opens a cell of its own, so that it closes a compound like any other.
    closes = (joint != ALONE) & np.append(joint[1:] != NEXT, True)[: len(joint)]
    texts = (
        map((",", ",(", ";").__getitem__, joint.tolist()),
        _labels(schedule.stage),
        map(_OPS.__getitem__, schedule.op.tolist()),
        _labels(schedule.microbatch),
        map(("", ")BATCH", ")OVERLAP_F_B").__getitem__, np.where(closes, 1 + schedule.computes, 0).tolist()),
    )
    actions = list(map("".join, zip(*texts, strict=True)))
    rows = (
        "".join(actions[start:end])[1:] or '""' * (end > start) for start, end in pairwise(schedule.starts.tolist())
    )
    return "".join(f"{row}\r\n" for row in rows)


def _labels(numbers: Ints) -> Iterator[str]:
    values, places = np.unique(numbers, return_inverse=True)
    return map(["" if value == NO_MICROBATCH else str(value) for value in values.tolist()].__getitem__, places.tolist())


def _parts(cell: str) -> list[tuple[int, int]]:
    """`op` and `joint` of each action of a cell."""
    if cell.strip(BLANKS) in _EMPTY:
        return [(IDLE, ALONE)]
    parsed = parse_cell(cell)
    if isinstance(parsed, Action):
        return [(CODES[parsed.op], ALONE)]
    return [(CODES[action.op], NEXT if place else FIRST) for place, action in enumerate(parsed.actions)]


def _expand(
    known: Sequence[Sequence[tuple[int, int]]], cells: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """`op` and `joint` of the actions of `cells`, each one of those that are known; where each starts, and the end."""
    op, joint = np.array([*chain.from_iterable(known)], np.uint8).reshape(-1, 2).T
    count = np.array([*map(len, known)], np.int64)
    first = (np.cumsum(count) - count)[cells]
    ends = np.append(0, np.cumsum(count[cells]))
    at = np.arange(ends[-1]) + np.repeat(first - ends[:-1], count[cells])
    return op[at], joint[at], ends


def _refuse(rows: Sequence[str], name: str) -> NoReturn:
    """Name the first cell that is wrong."""
    for rank, row in enumerate(rows):
        cells = row.split(",") if row else []
        for column, cell in enumerate(cells):
            try:
                _parts(cell)
            except UsageError as error:
                place = f"row {rank + 1} of {len(rows)} (rank {rank}), column {column + 1} of {len(cells)}"
                raise UsageError(f"{name}, {place}: {error}") from None
    raise AssertionError(f"{name}: a cell was refused by its shape and accepted by its text")
