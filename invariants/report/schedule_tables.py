"""What was decided about schedules as tables and texts: for the terminal, and as a page of HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.table import Table
from rich.text import Text

from invariants.report.schedule_chart import picked

if TYPE_CHECKING:
    from invariants.commands.schedule_judge import Judged, Measured
    from invariants.commands.schedule_sources import Source
    from invariants.schedule.timeline import Timeline

_READABLE: Final = 10**15
"""Whole numbers below it are written out."""
RANKS: Final = 24
"""Most ranks in a table; of more, each k-th and the last."""
WEIGHTS: Final = (
    "all have the same layers: where a rank holds v times as many stages, each takes 1/v of the costs, and a "
    "microbatch in flight on it counts 1/v"
)
SHOWN: Final = 10
"""Problems of one check that are printed."""

_STYLES: Final = {"holds": "green", "violated": "bold red", "unknown": "bold magenta", "not applicable": "dim"}


@dataclass(frozen=True)
class Grid:
    """A table as texts; those that are verdicts get a colour."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def terminal(self) -> Iterator[Table | str]:
        """For the terminal."""
        table = Table(*self.header)
        for row in self.rows:
            table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
        if self.title:
            yield self.title
        yield table
        if self.note:
            yield self.note

    def html(self) -> str:
        """For a page."""
        lines = [f"<h2>{html.escape(self.title)}</h2>"] if self.title else []
        lines += ["<table>", _row("th", self.header)]
        lines += [_row("td", row) for row in self.rows]
        note = f"<p>{'<br>'.join(map(html.escape, self.note.splitlines()))}</p>" if self.note else ""
        return "\n".join([*lines, "</table>", note])


def _row(tag: str, cells: Sequence[str]) -> str:
    kinds = [f' class="{cell}"' if cell in ("holds", "violated", "unknown") else "" for cell in cells]
    texts = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(texts)}</tr>"


def everything(judged: Sequence[Judged]) -> Iterator[Table | str]:
    """All that is printed: the tables, then what is wrong, at length."""
    for grid in grids(judged):
        yield from grid.terminal()
    for each in judged:
        for text in texts(each):
            yield f"\n{text}"


def grids(judged: Sequence[Judged]) -> list[Grid]:
    """Of one schedule its verdicts and a row a rank; of several a row a schedule."""
    if len(judged) > 1:
        return [_comparison(judged)]
    (one,) = judged
    return [_verdicts(one), *([_ranks(one.measured)] if one.measured else [])]


def headline(judged: Judged) -> str:
    """Such as `1f1b: 4 ranks, 8 microbatches, makespan 33, 27.3 % idle`."""
    parts = [sizes(judged)]
    if judged.measured:
        timeline = judged.measured.timeline
        parts.append(f"makespan {number(timeline.makespan)}, {share(_mean_idle(timeline))} idle")
    return f"{judged.source.name}: {', '.join(parts)}"


def sizes(judged: Judged) -> str:
    """Such as `4 ranks, 8 microbatches, 2 stages a rank`."""
    source = judged.source
    ranks = source.schedule.ranks
    each, more = divmod(source.stages, ranks)
    virtual = f", {source.stages} stages" if more else f", {each} stages a rank" if each != 1 else ""
    return f"{_count(ranks, 'rank')}, {_count(source.microbatches, 'microbatch', 'microbatches')}{virtual}"


def _verdicts(judged: Judged) -> Grid:
    rows = [(line.check, line.verdict, line.detail) for line in judged.lines]
    note = f"sends and receives: added by the lowering {judged.lowering}" if judged.lowering else ""
    return Grid(headline(judged), ("check", "verdict", "found"), rows, note)


def _ranks(measured: Measured) -> Grid:
    timeline, peaks = measured
    schedule = timeline.schedule
    header = ["rank", "stages", "busy", "idle of makespan", "own span less work", "peak in flight"]
    header += ["peak bytes"] if peaks.rank_bytes is not None else []
    rows = []
    for rank in picked(schedule.ranks, RANKS):
        stages = np.flatnonzero(schedule.placement == rank).tolist()
        row = [str(rank), ", ".join(map(str, stages)), number(timeline.busy[rank])]
        row += [share(timeline.idle_share[rank]), number(timeline.own_idle[rank]), str(peaks.rank[rank])]
        rows.append(row + ([str(peaks.rank_bytes[rank])] if peaks.rank_bytes is not None else []))
    some = "" if len(rows) == schedule.ranks else f"{len(rows)} of {schedule.ranks} ranks; "
    return Grid("", header, rows, f"{some}bound by: {', '.join(timeline.critical_path())}")


def _comparison(judged: Sequence[Judged]) -> Grid:
    """A column a schedule: there are more checks than schedules."""
    rows = [[name, *(number(size(each.source)) for each in judged)] for name, size in _SIZES.items()]
    found = [{line.check: line.verdict for line in each.lines} for each in judged]
    checks = dict.fromkeys(check for each in found for check in each)
    rows += [[check, *(each.get(check, "") for each in found)] for check in checks]
    for name, figure in _FIGURES.items():
        rows.append([name, *(figure(each.measured, each.weight) if each.measured else "" for each in judged)])
    rows = [row for row in rows if any(row[1:])]
    rows.append(["lowering", *(each.lowering or "its own" for each in judged)])
    notes = [] if all(each.weight == 1 for each in judged) else [WEIGHTS]
    notes += [
        f"{each.source.name} is bound by: {', '.join(each.measured.timeline.critical_path())}"
        for each in judged
        if each.measured
    ]
    return Grid("", ["", *(each.source.name for each in judged)], rows, "\n".join(notes))


_SIZES: Final[Mapping[str, Callable[[Source], int]]] = {
    "ranks": lambda source: source.schedule.ranks,
    "microbatches": lambda source: source.microbatches,
    "stages a rank": lambda source: source.virtual,
}


def _mean_idle(timeline: Timeline) -> Fraction:
    return sum(map(Fraction, timeline.idle_share), Fraction()) / len(timeline.idle_share)


_FIGURES: Final[Mapping[str, Callable[[Measured, Fraction], str]]] = {
    "makespan": lambda run, _: number(run.timeline.makespan),
    "idle of makespan, mean of ranks": lambda run, _: share(_mean_idle(run.timeline)),
    "own span less work, greatest": lambda run, _: number(max(run.timeline.own_idle)),
    "peak in flight, greatest": lambda run, weight: number(weight * int(run.peaks.rank.max())),
    "peak bytes, greatest": lambda run, _: "" if run.peaks.rank_bytes is None else str(run.peaks.rank_bytes.max()),
}


def texts(judged: Judged) -> Iterator[str]:
    """What is wrong with a schedule, at length: a text for each check that does not hold."""
    told: dict[tuple[str, ...], str] = {}
    for line in judged.lines:
        problems = tuple(line.problems)
        if not problems:
            continue
        first = told.setdefault(problems, line.check)
        if first != line.check:
            yield f"{judged.source.name}: {line.check} is {line.verdict} by what is told of {first}"
            continue
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        said = "\n".join(f"  {text}" for text in [*problems[:SHOWN], *more, *line.notes])
        yield f"{judged.source.name}: {line.check} is {line.verdict}\n{said}"


def page(judged: Sequence[Judged], svg: str) -> str:
    """A page of HTML that needs nothing else: picture, tables and texts."""
    title = html.escape("; ".join(headline(each) for each in judged))
    picture = svg[svg.index("<svg") :]
    said = "\n".join(f"<pre>{html.escape(text)}</pre>" for each in judged for text in texts(each))
    tables = "\n".join(grid.html() for grid in grids(judged))
    head = f'<meta charset="utf-8">\n<title>{title}</title>\n<style>{_STYLE}</style>'
    body = f"<body>\n{picture}\n{tables}\n{said}\n</body>"
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n{body}\n</html>\n'


def verdicts(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """The verdicts of each schedule, for machines."""
    return [{"schedule": headline(each), **{line.check: line.verdict for line in each.lines}} for each in judged]


def number(value: Fraction | float) -> str:
    """A number: exact where it is whole and can be read, else with six digits."""
    return str(int(value)) if value == int(value) and -_READABLE < value < _READABLE else f"{float(value):.6g}"


def share(value: Fraction | float) -> str:
    """A share in percent."""
    return f"{100 * float(value):.2f} %"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1600px; padding: 0 1em; color: #222 }
svg { width: 100%; height: auto }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border: 1px solid #ccc; padding: .25em .7em; text-align: left; vertical-align: top }
th { background: #f3f3f3 }
.holds { color: #19692c } .violated { color: #b00020; font-weight: bold } .unknown { color: #86198f; font-weight: bold }
pre { background: #f7f7f7; padding: .7em; overflow-x: auto }
"""
