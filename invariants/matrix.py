"""Planted faults against invariants: which invariant sees which fault, and whether any cries at a harmless variant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from invariants.case import Case
from invariants.invariant import Invariant, Status, Verdict
from invariants.store import Run
from invariants.target import Fault

Outcome = Literal["caught", "not caught", "clean", "flagged", "not judged", "no case"]


@dataclass(frozen=True)
class Row:
    """What the invariants said of one fault or variant.

    `cases` were run under it, in this order. `violated` and `unknown` hold the first verdict of that status of each
    invariant, by its id, without what the same case gets when nothing is planted. `judged` counts the cases about
    which at least one invariant said that it holds or is violated.
    """

    name: str
    report: str
    harmless: bool
    cases: tuple[Case, ...] = ()
    judged: int = 0
    violated: Mapping[str, Verdict] = field(default_factory=dict)
    unknown: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """A fault is `caught` by a violation alone; a variant under which something is lost is `flagged` as well."""
        if not self.cases:
            return "no case"
        if not self.harmless:
            return "caught" if self.violated else "not caught"
        if self.violated or self.unknown:
            return "flagged"
        return "clean" if self.judged else "not judged"

    @property
    def passed(self) -> bool:
        """Whether the fault was caught, or the variant seen to be harmless."""
        return self.outcome in ("caught", "clean")

    @property
    def marked(self) -> frozenset[str]:
        """Invariants that were violated or unknown."""
        return frozenset((*self.violated, *self.unknown))

    @property
    def telling(self) -> Case | None:
        """The first case that shows the outcome best: of a violation, else of what is unknown, else the first run."""
        for verdict in (*self.violated.values(), *self.unknown.values()):
            return verdict.case
        return self.cases[0] if self.cases else None


def matrix(
    faults: Mapping[str, Fault],
    cases: Sequence[Case],
    invariants: Sequence[Invariant],
    run: Run,
    *,
    tries: int = 6,
    variants: int = 2,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> tuple[Row, ...]:
    """Judge runs under each fault, on those of `cases` to which it applies, large worlds with a save first.

    A fault is run until an invariant is violated that the same case does not violate without it, in at most `tries`
    cases; a harmless variant until `variants` cases are judged, in at most as many. `progress` is called before each
    fault with the number of faults done, their total and the fault's name. One row a fault, planted ones first.
    """
    healthy: dict[Case, dict[str, Status]] = {}

    def before(case: Case) -> dict[str, Status]:
        if case not in healthy:
            healthy[case] = {verdict.invariant: verdict.status for verdict in judge(case, None)}
        return healthy[case]

    def judge(case: Case, fault: str | None) -> list[Verdict]:
        evidence = run(case, fault)
        return [invariant.judge(evidence) for invariant in invariants]

    ordered = sorted(cases, key=lambda case: (-case.topology.world_size, case.save_after is None))
    rows: list[Row] = []
    for name, fault in sorted(faults.items(), key=lambda item: item[1].harmless):
        progress(len(rows), len(faults), name)
        applicable = [case for case in ordered if fault.applies(case)]
        limit = max(tries, variants) if fault.harmless else tries
        row = Row(name, fault.report, fault.harmless)
        for case in applicable[:limit]:
            row = _with(row, case, judge(case, name), before)
            if row.judged >= variants if fault.harmless else row.violated:
                break
        rows.append(row)
    return tuple(rows)


def _with(row: Row, case: Case, verdicts: Iterable[Verdict], before: Callable[[Case], Mapping[str, Status]]) -> Row:
    found: dict[Status, dict[str, Verdict]] = {"violated": dict(row.violated), "unknown": dict(row.unknown)}
    judged = False
    for verdict in verdicts:
        judged |= verdict.status in ("holds", "violated")
        if verdict.status in found and before(case)[verdict.invariant] != verdict.status:
            found[verdict.status].setdefault(verdict.invariant, verdict)
    return Row(
        row.name, row.report, row.harmless, (*row.cases, case), row.judged + judged, found["violated"], found["unknown"]
    )
