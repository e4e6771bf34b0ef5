"""`invariants faults`: plant each fault of a target, and show which invariant sees it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invariants.commands.session import HOLD, VIOLATED, Worlds, at_least_one, faults_of, registered
from invariants.loading import load_target
from invariants.matrix import Row, matrix
from invariants.report import document, terminal
from invariants.report.progress import Progress


@dataclass(frozen=True)
class Plan:
    """What to plant: the faults of these names, or all; on cases of a plan of `cases` drawn from `seed`."""

    spec: str
    only: Sequence[str]
    cases: int
    seed: int
    tries: int
    variants: int
    json: Path | None


def faults(plan: Plan, worlds: Worlds) -> int:
    """Print the matrix; exit status 0 where each fault is caught and each harmless variant seen to be harmless."""
    for option, value in (("--cases", plan.cases), ("--tries", plan.tries), ("--variants", plan.variants)):
        at_least_one(option, value)
    out = document.check_writable(plan.json) if plan.json else None
    target = load_target(plan.spec)
    planted = faults_of(target, plan.only)
    invariants = tuple(registered().values())
    from invariants import campaign

    cases = campaign.plan(target, plan.cases, plan.seed, worlds.largest)
    with Progress(terminal.console(sys.stderr), f"planting {len(planted)} faults in {target.name}") as progress:

        def tell(done: int, total: int, name: str) -> None:
            progress.say(f"planting {name}")
            progress.count(done, total)

        with worlds.running(target, cases) as (run, _):
            rows = matrix(
                *(planted, cases, invariants, progress.counting(run)),
                tries=plan.tries,
                variants=plan.variants,
                progress=tell,
            )
    status = HOLD if all(row.passed for row in rows) else VIOLATED
    ids = [invariant.id for invariant in invariants]
    replays = [_replay(plan.spec, row, worlds) for row in rows]
    summary = {"runs": progress.runs, "seconds": round(progress.seconds, 1), "seed": plan.seed}
    _print(rows, ids, replays, summary, whole=not plan.only)
    if out:
        found = [document.row_document(row, ids, replay) for row, replay in zip(rows, replays, strict=True)]
        head = {"command": "faults", "target": plan.spec, "name": target.name}
        whole = {**head, **summary, "exit_status": status, "invariants": ids, "faults": found}
        return document.write_last(out, whole, status)
    return status


def _replay(spec: str, row: Row, worlds: Worlds) -> str | None:
    case = row.telling
    return terminal.replay_line(spec, case, fault=row.name, also=worlds.options) if case else None


def _print(
    rows: Sequence[Row], ids: Sequence[str], replays: Sequence[str | None], summary: dict[str, Any], *, whole: bool
) -> None:
    console = terminal.console(sys.stdout)
    console.print(terminal.fault_table(rows, ids))
    for number, name in enumerate(ids, 1):
        console.print(f"{number:3} {name}")
    for row, replay in zip(rows, replays, strict=True):
        if not row.passed:
            console.print("\n" + terminal.row_text(row, replay), soft_wrap=True)
    blind = [name for name in ids if not any(name in row.violated for row in rows if not row.harmless)]
    if whole and blind:  # of some faults alone, it would say nothing of the invariants
        console.print(f"\nno fault here violates {', '.join(blind)}", soft_wrap=True)
    console.print(
        f"\n{terminal.matrix_summary(rows)}, " + "{runs} runs, {seconds:.1f} s, seed {seed}".format(**summary)
    )
