"""A schedule as SVG or PNG, drawn by matplotlib, an optional extra: rank by time, and below what the ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.report.schedule_chart import KINDS, LETTERS, MEANING, Chart, Window, picked
from invariants.schedule.table import B, F, I, W

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {F: "#7aa6d8", I: "#8fcfb0", W: "#f2cf7c", B: "#5fb389"}
LATER: Final = {F: "#3f6ea6", I: "#3f9470", W: "#b98718", B: "#2f7d57"}
"""Of a rank's second stage and those after it."""
IDLE_COLOUR: Final = "#f8dcdc"

WIDTH_IN: Final = 15.0
MARGIN_IN: Final = 0.9
ROW_IN: Final = 0.32
RANKS_IN: Final = (0.7, 7.0)
MEMORY_IN: Final = 1.8
NUMBER_PT: Final = (2.7, 8.0)
"""Least and greatest size of the numbers in boxes."""
NARROWEST_PT: Final = 1.5
"""Width of a computation below which each column of the picture has the mean colour of what happens in it."""
DPI: Final = 120
FINE_DPI: Final = 300
"""Of a picture with small numbers."""
SMALL_PT: Final = 6.0
CURVES: Final = 6
"""Ranks whose memory is drawn; of more, each k-th and the last."""


def require_matplotlib() -> None:
    """`UsageError` where pictures cannot be drawn here."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "matplotlib, which draws pictures, is not installed: pip install pytest-invariants[pictures]; "
            "--timeline and -o FILE.json need none"
        )


def write_picture(file: IO[Any], form: str, charts: Sequence[Chart], window: Window | None = None) -> None:
    """Draw the charts below each other, on one scale of time, as `form`: svg or png.

    `window` is the part of time that is drawn, in the unit of the costs; all without one. The same charts make the same
    bytes.
    """
    from matplotlib import rc_context

    page = _Page.of(charts, window or (0.0, max(chart.makespan for chart in charts) or 1.0))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "invariants", "font.size": 9}):
        figure = _figure(page)
        figure.savefig(file, format=form, dpi=page.dpi, metadata={"Date": None} if form == "svg" else None)


@dataclass(frozen=True)
class _Page:
    """What is drawn: of each chart the computations within the window, and the size of its numbers, 0 for none."""

    charts: Sequence[Chart]
    window: Window
    shown: Sequence[NDArray[np.intp]]
    numbers: Sequence[float]

    @classmethod
    def of(cls, charts: Sequence[Chart], window: Window) -> _Page:
        shown = [chart.within(window) for chart in charts]
        numbers = [_number_pt(chart, at, window) for chart, at in zip(charts, shown, strict=True)]
        return cls(charts, window, shown, numbers)

    @property
    def dpi(self) -> int:
        return FINE_DPI if any(0 < size < SMALL_PT for size in self.numbers) else DPI


def _point(window: Window) -> float:
    """Points (1/72 inch) in a unit of time."""
    return (WIDTH_IN - MARGIN_IN) * 72 / (window[1] - window[0])


def _number_pt(chart: Chart, shown: NDArray[np.intp], window: Window) -> float:
    """Size at which each number fits into its box, by width and by height; 0 where it would be too small."""
    digits = len(str(chart.microbatch[shown].max(initial=0)))
    wide = (chart.shortest(shown) * _point(window) - 0.8) / (0.62 * digits)
    high = min(ROW_IN, RANKS_IN[1] / chart.ranks) * 72 * (0.4 if chart.joint.any() else 0.8)
    size = min(wide, high, NUMBER_PT[1])
    return size if size >= NUMBER_PT[0] else 0


def _figure(page: _Page) -> Figure:
    from matplotlib.figure import Figure

    heights = [min(max(ROW_IN * chart.ranks, RANKS_IN[0]), RANKS_IN[1]) for chart in page.charts]
    heights.append(MEMORY_IN)
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 0.9 + 0.35 * len(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for number, axis in enumerate(axes[:-1]):
        _draw(axis, page, number)
    _draw_memory(axes[-1], page.charts)
    axes[-1].set_xlim(page.window)
    axes[-1].set_xlabel("time, in the unit of the costs")
    _legend(figure, page)
    return figure


def _draw(axis: Axes, page: _Page, number: int) -> None:
    """Ranks from top to bottom, each computation a box; what no box covers up to the makespan is idle."""
    chart, shown = page.charts[number], page.shown[number]
    axis.set_title(chart.title, loc="left", fontweight="bold", fontsize=10)
    axis.set_ylim(chart.ranks - 0.5, -0.5)
    ticks = picked(chart.ranks, 16)
    axis.set_yticks(ticks, [f"rank {rank}" for rank in ticks])
    axis.tick_params(axis="y", length=0)
    if chart.shortest(shown) * _point(page.window) < NARROWEST_PT:
        axis.set_title("mean colours: single computations are too narrow here", loc="right", fontsize=9)
        _draw_columns(axis, chart, page)
        return
    axis.barh(range(chart.ranks), chart.makespan, height=0.92, color=IDLE_COLOUR)
    _draw_boxes(axis, chart, shown)
    if page.numbers[number]:
        _draw_numbers(axis, chart, shown, page.numbers[number])


def _draw_boxes(axis: Axes, chart: Chart, shown: NDArray[np.intp]) -> None:
    from matplotlib.collections import PolyCollection

    top, bottom = _extent(chart)
    for kind in chart.kinds:
        for later, colours in enumerate((COLOURS, LATER)):
            at = shown[(chart.op[shown] == kind) & ((chart.chunk[shown] > 0) == later)]
            left, right, high, low = chart.start[at], chart.end[at], top[at], bottom[at]
            corners = np.stack([left, high, right, high, right, low, left, low], axis=1).reshape(-1, 4, 2)
            boxes = PolyCollection(list(corners), facecolor=colours[kind], edgecolor="white", linewidth=0.5)
            axis.add_collection(boxes)


def _extent(chart: Chart) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Top and bottom of each box: the whole line of its rank, or half of it where it shares its time."""
    forward = chart.op == F
    top = np.where(chart.joint & ~forward, chart.rank, chart.rank - 0.46)
    return top, np.where(chart.joint & forward, chart.rank, chart.rank + 0.46)


def _draw_numbers(axis: Axes, chart: Chart, shown: NDArray[np.intp], size: float) -> None:
    """The microbatch in each box."""
    top, bottom = _extent(chart)
    for index in shown.tolist():
        axis.text(
            (chart.start[index] + chart.end[index]) / 2,
            (top[index] + bottom[index]) / 2,
            str(chart.microbatch[index]),
            ha="center",
            va="center_baseline",
            size=size,
            color="white" if chart.chunk[index] else "black",
            clip_on=True,
        )


def _draw_columns(axis: Axes, chart: Chart, page: _Page) -> None:
    """An image of mean colours: what boxes too narrow to be told apart look like from afar."""
    from matplotlib.colors import to_rgb

    kinds, idle = np.array([to_rgb(COLOURS[kind]) for kind in KINDS]), np.array(to_rgb(IDLE_COLOUR))
    edges = np.linspace(*page.window, int(WIDTH_IN * DPI) + 1)
    image = np.empty((chart.ranks, len(edges) - 1, 3))
    for rank, shares in enumerate(chart.coverage(edges)):
        total = shares.sum(axis=0)
        image[rank] = (shares / np.maximum(total, 1)).T @ kinds + np.maximum(0, 1 - total)[:, None] * idle
    image[:, edges[:-1] >= chart.makespan] = 1
    extent = (*page.window, chart.ranks - 0.5, -0.5)
    axis.imshow(image.clip(0, 1), aspect="auto", interpolation="nearest", extent=extent)


def _draw_memory(axis: Axes, charts: Sequence[Chart]) -> None:
    """What ranks hold over time: of one chart all ranks or some, of several the rank that holds most."""
    from matplotlib.ticker import EngFormatter

    highest = 0.0
    amount = EngFormatter("B" if charts[0].holds == "bytes" else "")
    for number, (chart, rank) in enumerate(_curves(charts)):
        times, held = chart.held(rank)
        peak = float(held.max(initial=0))
        highest = max(highest, peak)
        label = f"rank {rank}" if len(charts) == 1 else f"{chart.name}, rank {rank}"
        times, held = np.append(times, chart.makespan), np.append(held, held[-1])
        axis.step(times, held, where="post", label=f"{label}: {amount(peak)}", color=f"C{number}", linewidth=1.4)
    axis.set_title(f"{charts[0].holds} in flight, and the most of each rank", loc="left", fontsize=10)
    axis.set_ylim(0, highest * 1.3 + 0.5)
    axis.locator_params(axis="y", integer=True)
    axis.yaxis.set_major_formatter(amount)
    axis.grid(axis="y", linewidth=0.4)
    axis.legend(loc="upper right", ncols=CURVES + 1, fontsize=8)


def _curves(charts: Sequence[Chart]) -> Iterator[tuple[Chart, int]]:
    if len(charts) == 1:
        yield from ((charts[0], rank) for rank in picked(charts[0].ranks, CURVES))
        return
    for chart in charts:
        peaks = [chart.held(rank)[1].max(initial=0) for rank in range(chart.ranks)]
        yield chart, peaks.index(max(peaks))


def _legend(figure: Figure, page: _Page) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=COLOURS[kind], label=f"{LETTERS[kind]} {MEANING[kind]}")
        for kind in KINDS
        if any(kind in chart.kinds for chart in page.charts)
    ]
    patches.append(Patch(facecolor=IDLE_COLOUR, label="idle"))
    if any(chart.chunks > 1 for chart in page.charts):
        patches.append(Patch(facecolor=LATER[F], label="darker: not the rank's first stage"))
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False)
