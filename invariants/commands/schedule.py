"""`invariants schedule`: judge schedules from files or by name, print and draw them."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from invariants.commands.schedule_judge import Judged, judge
from invariants.commands.schedule_sources import (
    Sizes,
    costs,
    lowering,
    outputs,
    read_window,
    scaled,
    sources,
    transports,
)
from invariants.commands.session import UNKNOWN, VIOLATED, exit_status
from invariants.errors import UsageError
from invariants.report import document, schedule_tables, terminal
from invariants.report.schedule_chart import Chart, Window
from invariants.report.schedule_terminal import timeline_text
from invariants.report.schedule_trace import write_trace
from invariants.schedule.compiled import only_where_it_pays


@dataclass(frozen=True)
class Plan:
    """What to judge and what to show: the options as they are given."""

    given: Sequence[str]
    sizes: Sizes
    family: str | None
    transport: Sequence[str]
    lowering: str
    cost: str
    timeline: bool
    window: str | None
    out: Sequence[Path]


def schedule(plan: Plan) -> int:
    """Judge, print and draw; returns the exit status. A user's mistake raises, before anything is written."""
    try:
        return _schedule(plan)
    except MemoryError:
        raise UsageError("schedule: more than this machine's memory: expected fewer ranks or microbatches") from None


def _schedule(plan: Plan) -> int:
    out = outputs(plan.out)
    part = read_window(plan.window)
    wanted, how, price = transports(plan.transport), lowering(plan.lowering), costs(plan.cost)
    found = [*sources(plan.given, plan.sizes, plan.family)]
    weights = [Fraction(min(each.virtual for each in found), source.virtual) for source in found]
    pairs = list(zip(found, weights, strict=True))
    with only_where_it_pays(sum(len(source.schedule) for source in found)):
        judged = [judge(source, wanted, how, scaled(price, weight), weight) for source, weight in pairs]
        charts = _charts(judged, plan.window) if plan.timeline or out else []
    status = exit_status(line.verdict for each in judged for line in each.lines)
    _print(plan, judged, charts, part)
    for path, form in out if charts else ():
        try:
            _write(path, form, judged, charts, part)
        except OSError as error:
            print(f"-o {path}: could not be written: {error.strerror}", file=sys.stderr)
            status = status if status == VIOLATED else UNKNOWN
    return status


def _charts(judged: Sequence[Judged], window: str | None) -> list[Chart]:
    charts = [
        Chart.of(each.source.name, schedule_tables.headline(each), each.measured.timeline, float(each.weight))
        for each in judged
        if each.measured
    ]
    last = max((chart.makespan for chart in charts), default=0.0)
    if not charts:
        print("nothing to draw: no schedule that was given ends", file=sys.stderr)
    elif (part := read_window(window)) and part[0] >= last:
        raise UsageError(f"--window {window}: begins after the last makespan, {last:g}")
    return charts


def _print(plan: Plan, judged: Sequence[Judged], charts: Sequence[Chart], part: Window | None) -> None:
    console = terminal.console(sys.stdout)
    for piece in schedule_tables.everything(judged):
        console.print(piece, soft_wrap=isinstance(piece, str))
    for chart in charts if plan.timeline else ():
        console.print()
        console.print(timeline_text(chart, console.width, part), soft_wrap=True)


def _write(path: Path, form: str, judged: Sequence[Judged], charts: Sequence[Chart], part: Window | None) -> None:
    from invariants.report.schedule_picture import write_picture

    with document.whole(path) as file:
        if form == "json":
            text = io.TextIOWrapper(file, "utf-8")
            write_trace(text, charts, {"verdicts": schedule_tables.verdicts(judged)})
            text.detach()
        elif form == "html":
            picture = io.BytesIO()
            write_picture(picture, "svg", charts, part)
            file.write(schedule_tables.page(judged, picture.getvalue().decode()).encode())
        else:
            write_picture(file, form, charts, part)
