"""What a person reads at the end: tables of verdicts and of faults, and the text of a failure."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from invariants.case import Case
from invariants.invariant import Verdict

if TYPE_CHECKING:
    from invariants.campaign import Judgement
    from invariants.known import Known
    from invariants.matrix import Row

LOG_WIDTH = 140
"""Columns of a table in a log, which is no terminal and has no width of its own."""
SHOWN = 20
"""Violations of one case and invariant that are printed."""

_STYLES = {
    "holds": "green",
    "known": "yellow",
    "refused": "yellow",
    "not applicable": "dim",
    "violated": "bold red",
    "unknown": "bold magenta",
}
_COUNTED = {"holds": "hold"}


def console(file: TextIO) -> Console:
    """A console that prints text as it is: no markup, no emoji, and colours on a terminal only."""
    own = Console(file=file, markup=False, highlight=False, emoji=False)
    if not own.is_terminal and "COLUMNS" not in os.environ:
        own.width = LOG_WIDTH
    return own


def replay_line(spec: str, case: Case, *, only: str | None = None, fault: str | None = None, also: str = "") -> str:
    """The command that judges this one case again, safe for a shell; `also` holds further options."""
    options = [*(["--fault", fault] if fault else []), *(["--only", only] if only else []), *also.split()]
    return shlex.join(["invariants", "replay", f"{spec}/{case}", *options])


def counts_text(counts: Mapping[str, int]) -> str:
    """Such as `31 hold, 5 not applicable, 4 refused`, in the order in which verdicts matter."""
    order = ("holds", "violated", "known", "unknown", "not applicable", "refused")
    return ", ".join(f"{counts[status]} {_COUNTED.get(status, status)}" for status in order if counts.get(status))


def judgement_table(judgements: Sequence[Judgement]) -> Table:
    """One row an invariant: id, verdict, number of cases by verdict, and why it does not hold."""
    table = Table("invariant", "verdict", "cases", "reason")
    for judgement in judgements:
        status, reason = Text(judgement.status, _STYLES[judgement.status]), _headline(judgement.reason)
        table.add_row(judgement.invariant, status, counts_text(judgement.counts), reason)
    return table


def failure_text(judgement: Judgement, replay: str) -> str:
    """What is wrong, in which case, and the line `replay` that shows it again; of a violated or unknown invariant."""
    verdict = judgement.verdict
    if verdict is None:
        return f"{judgement.invariant} is {judgement.status}: {judgement.reason}"
    lines = [f"{judgement.invariant} is {judgement.status}", f"  case      {verdict.case}"]
    if judgement.status == "violated":
        lines += _offenders(verdict)
    else:
        lines.append("  reason    " + textwrap.indent(verdict.reason, " " * 12).strip())
    return "\n".join([*lines, f"  replay    {replay}"])


def _offenders(verdict: Verdict) -> Iterator[str]:
    yield f"  first     {verdict.first}"
    if verdict.worst is not verdict.first:
        yield f"  worst     {verdict.worst}"
    if (count := len(verdict.violations)) > 1:
        yield f"  in all    {count} violations in this case"


def verdict_text(verdict: Verdict) -> str:
    """An invariant's verdict on one case, with all that is violated, as far as `SHOWN` goes."""
    heading = f"{verdict.invariant}: {verdict.status}"
    if verdict.reason:
        heading += f": {textwrap.indent(verdict.reason, '  ').strip()}"
    lines = [heading, *(f"  {violation}" for violation in verdict.violations[:SHOWN])]
    if (more := len(verdict.violations) - SHOWN) > 0:
        lines.append(f"  and {more} more")
    return "\n".join(lines)


def known_texts(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Known violations that were met, numbered: of what, where, why, and where each was reported."""
    met: dict[Known, list[str]] = {}
    for judgement in judgements:
        for known, count in judgement.known:
            met.setdefault(known, []).append(f"{judgement.invariant} in {_cases(count)}")
    for number, (known, places) in enumerate(met.items(), 1):
        yield f"known violation {number}: {', '.join(places)}"
        yield f"  where     {known.when}"
        yield f"  reason    {known.reason}"
        yield f"  report    {known.report}"


def fault_table(rows: Sequence[Row], invariants: Sequence[str]) -> Table:
    """The matrix: a row a fault, harmless variants apart, and a numbered column an invariant.

    `x` is violated, `?` unknown; both are blank where the same case gets that verdict without the fault.
    """
    table = Table("fault", *map(str, range(1, len(invariants) + 1)), "outcome")
    harmless = False
    for row in rows:
        if row.harmless and not harmless:
            table.add_section()
            harmless = True
        marks = ["x" if each in row.violated else "?" if each in row.unknown else "" for each in invariants]
        table.add_row(row.name, *marks, Text(_outcome(row), "" if row.passed else "bold red"))
    return table


def _outcome(row: Row) -> str:
    kind = "variant " if row.harmless else ""
    if row.outcome == "no case":
        return f"{kind}not tried: it applies to no planned case"
    return f"{kind}{row.outcome}, {_cases(len(row.cases))}"


def row_text(row: Row, replay: str | None) -> str:
    """Why a row has not passed: what was tried, what the fault stands for, and a line that shows it."""
    lines = [f"{row.name}: {_outcome(row)}", f"  stands for  {row.report}"]
    for verdict in row.violated.values() if row.harmless else ():
        lines.append(f"  violated    {verdict.invariant}: {verdict.first}")
    lines += [f"  unknown     {verdict.invariant}: {_headline(verdict.reason)}" for verdict in row.unknown.values()]
    return "\n".join([*lines, *([f"  replay      {replay}"] if replay else [])])


def matrix_summary(rows: Sequence[Row]) -> str:
    """Such as `21 of 22 faults caught, 8 of 8 harmless variants clean`."""
    faults, variants = [[row.passed for row in rows if row.harmless is kind] for kind in (False, True)]
    caught = f"{sum(faults)} of {len(faults)} faults caught"
    return f"{caught}, {sum(variants)} of {len(variants)} harmless variants clean" if variants else caught


def _cases(count: int) -> str:
    return f"{count} case" if count == 1 else f"{count} cases"


def _headline(text: str) -> str:
    return text.splitlines()[0] if text else ""
