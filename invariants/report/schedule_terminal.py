"""A schedule in the terminal: a line a rank, time to the right, readable without colours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from rich.text import Text

from invariants.report.schedule_chart import KINDS, LETTERS, MEANING, Chart, Floats, Window, picked
from invariants.schedule.table import B, F, I, W

LINES: Final = 32
"""Most ranks that are drawn; of more, each k-th and the last."""
NARROW: Final = 20
"""Columns of time below which nothing can be told apart, whatever the width of the terminal."""
BANDS: Final = 4
IDLE, FILL, BOTH = ".", "-", "X"

_COLOURS: Final = {
    LETTERS[F]: "black on bright_blue",
    LETTERS[B]: "black on bright_green",
    LETTERS[I]: "black on bright_cyan",
    LETTERS[W]: "black on bright_yellow",
    BOTH: "black on bright_magenta",
    IDLE: "red",
}


def timeline_text(chart: Chart, width: int, window: Window | None = None) -> Text:
    """The chart in `width` columns, from time `window[0]` to `window[1]` in the unit of the costs; all without one.

    Where each computation gets a column or more, it is drawn by itself: its letter, its microbatch where that fits, and
    dashes to its end; for that, time may go on below in up to `BANDS` bands. Else each column shows what fills most of
    it.
    """
    begin, end = window or (0.0, chart.makespan or 1.0)
    shown = picked(chart.ranks, LINES)
    room = max(NARROW, width - len(f"rank {chart.ranks - 1} "))
    narrow = (end - begin) / room / chart.shortest(chart.within((begin, end)))
    apart = narrow <= BANDS * (1 + 1e-9)
    bands = max(1, math.ceil(narrow * (1 - 1e-9))) if apart else 1
    text = Text(f"{chart.title}\n", no_wrap=True)
    for band in _bands(begin, end, bands):
        text.append_text(_band(chart, shown, _edges(*band, room), apart))
    return text.append(_legend(chart, len(shown), apart))


def _bands(begin: float, end: float, bands: int) -> Iterator[Window]:
    length = (end - begin) / bands
    if bands > 1:
        length = math.ceil(length * (1 - 1e-9))
    for number in range(bands):
        yield begin + number * length, min(begin + (number + 1) * length, end)


def _band(chart: Chart, shown: list[int], edges: Floats, apart: bool) -> Text:
    """One line a rank, for one part of time."""
    label = len(f"rank {chart.ranks - 1} ")
    columns = len(edges) - 1
    text = Text(f"time {edges[0]:g} to {edges[-1]:g}, {(edges[-1] - edges[0]) / columns:.3g} a column\n")
    lines = _cells(chart, shown, edges) if apart else _columns(chart, shown, edges)
    for rank, line in zip(shown, lines, strict=True):
        text.append(f"rank {rank}".ljust(label)).append_text(line).append("\n")
    return text


def _edges(begin: float, end: float, room: int) -> Floats:
    """Times between the columns: a whole number of columns a unit of time, where there is room."""
    length = end - begin
    columns = int(length) * (room // int(length)) if length == int(length) and 0 < length <= room else room
    return np.linspace(begin, end, columns + 1)


def _cells(chart: Chart, shown: list[int], edges: Floats) -> Iterator[Text]:
    """A line a rank, of its computations one by one."""
    columns = len(edges) - 1
    scale = columns / (edges[-1] - edges[0])
    first, last = (
        np.rint((times - edges[0]) * scale).astype(int).clip(0, columns) for times in (chart.start, chart.end)
    )
    for rank in shown:
        where = chart.of_rank(rank)
        marks = [IDLE] * columns
        kinds = [IDLE] * columns
        open_until = -1.0
        for index in range(where.start, where.stop):
            at, to = int(first[index]), int(last[index])
            if at == to:
                continue
            both = bool(chart.joint[index]) and chart.start[index] < open_until
            name = _name(chart, index)
            if both:
                at = int(first[index - 1])
                name = f"{_name(chart, index - 1)}+{name}"
            open_until = float(chart.end[index])
            marks[at:to] = _label(name, to - at, both)
            kinds[at:to] = [BOTH if both else LETTERS[int(chart.op[index])]] * (to - at)
        yield _styled(marks, kinds)


def _name(chart: Chart, index: int) -> str:
    """Such as `F3`; small on any but the first stage of the rank."""
    letter = LETTERS[int(chart.op[index])]
    return f"{letter.lower() if chart.chunk[index] else letter}{chart.microbatch[index]}"


def _label(name: str, width: int, both: bool) -> str:
    """A computation's text: its name, else its letter, and dashes to its end."""
    short = BOTH if both else name[0]
    return (name if len(name) <= width else short).ljust(width, FILL)


def _columns(chart: Chart, shown: list[int], edges: Floats) -> Iterator[Text]:
    """A line a rank, each column by what fills most of it."""
    names = np.array([*(LETTERS[kind] for kind in KINDS), IDLE])
    picked_ranks = set(shown)
    for rank, shares in enumerate(chart.coverage(edges)):
        if rank in picked_ranks:
            idle = np.maximum(0, 1 - shares.sum(axis=0))
            marks = names[np.argmax(np.vstack([shares, idle]), axis=0)].tolist()
            yield _styled(marks, marks)


def _styled(marks: list[str], kinds: list[str]) -> Text:
    text = Text(no_wrap=True)
    begin = 0
    for at in range(1, len(marks) + 1):
        if at == len(marks) or kinds[at] != kinds[begin] or marks[at].isalpha():
            text.append("".join(marks[begin:at]), _COLOURS[kinds[begin]])
            begin = at
    return text


def _legend(chart: Chart, shown: int, apart: bool) -> str:
    kinds = ", ".join(f"{LETTERS[kind]} {MEANING[kind]}" for kind in chart.kinds)
    parts = [f"{kinds}, {IDLE} idle"]
    if apart:
        parts.append("numbers are microbatches")
        if chart.chunks > 1:
            parts.append("small letters: not the rank's first stage")
        if chart.joint.any():
            parts.append(f"{BOTH} two at once")
    else:
        parts.append("a column shows what fills most of it")
    if shown < chart.ranks:
        parts.append(f"{shown} of {chart.ranks} ranks")
    return "; ".join(parts)
