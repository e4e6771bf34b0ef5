"""What the suites of a session did, on pytest's last page and in JUnit's properties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from invariants.campaign import Judgement
    from invariants.known import Known
    from invariants.store import Store

PREFIX = "invariants."
"""Of the names of properties; they travel with reports, from workers of xdist too."""


def record(
    item: pytest.Item, target: str, judgement: Judgement, store: Store, source: str, known: Sequence[Known] = ()
) -> None:
    """Leave the figures of one judgement with its item; `source` is where its cases are from, `known` what is known."""
    met = {entry for entry, _ in judgement.known}
    figures: dict[str, object] = {
        "target": target,
        "status": judgement.status,
        "cases": sum(judgement.counts.values()),
        "source": source,
        "refused": judgement.counts.get("refused", 0),
        "runs": sum(line.startswith("plan ") for line in store.runs()),
        "extra_runs": judgement.extra_runs,
        "known": "; ".join(
            f"{entry.reason} ({entry.report}): {_number(count, 'case')}" for entry, count in judgement.known
        ),
        "unmatched": "\n".join(
            f"{entry.invariant} where {' '.join(entry.when.split())}"
            for entry in known
            if entry.invariant in ("*", judgement.invariant) and entry not in met
        ),
    }
    item.user_properties.extend((PREFIX + name, value) for name, value in figures.items())


def summarize(reporter: pytest.TerminalReporter) -> None:
    """Write a line a suite: its cases and runs; and one for each invariant with known violations."""
    suites: dict[str, list[tuple[str, dict[str, object]]]] = {}
    for name, figures in _recorded(reporter):
        suite, _, invariant = name.removesuffix("]").rpartition("[")
        suites.setdefault(suite, []).append((invariant, figures))
    if suites:
        reporter.section("invariants")
    for suite, items in suites.items():
        reporter.line(f"{suite}: {_line([figures for _, figures in items])}")
        for invariant, figures in items:
            if figures["known"]:
                reporter.line(f"  known: {invariant}: {figures['known']}")
        unmatched = Counter(line for _, figures in items for line in str(figures["unmatched"]).splitlines())
        for line, count in unmatched.items():
            if not line.startswith("*") or count == len(items):  # an entry for all is met by any
                reporter.line(f"  known violation of {line}: matched no case")


def _recorded(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, dict[str, object]]]:
    """Name and figures of each judged item; its other phases repeat those of its set-up."""
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "setup":
                properties = {
                    name.removeprefix(PREFIX): value
                    for name, value in report.user_properties
                    if name.startswith(PREFIX)
                }
                if properties:
                    yield report.nodeid, properties


def _line(figures: list[dict[str, object]]) -> str:
    def numbers(name: str) -> list[int]:
        return [int(str(each[name])) for each in figures]

    # Other workers' runs are seen by the items that end last; an item counts its own extra runs only.
    cases, runs, extra_runs = max(numbers("cases")), max(numbers("runs")), sum(numbers("extra_runs"))
    return (
        f"target {figures[0]['target']}, {_number(cases, 'case')} from {figures[0]['source']}, "
        f"{_number(runs, 'run')}, {_number(extra_runs, 'extra run')} to shrink, {max(numbers('refused'))} refused"
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
