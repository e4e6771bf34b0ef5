"""`invariants check`: draw cases of a target, run them, judge them by every invariant."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariants.commands.session import Worlds, at_least_one, exit_status, registered
from invariants.loading import load_target
from invariants.registry import select
from invariants.report import document, terminal
from invariants.report.progress import Progress
from invariants.target import HasKnown

if TYPE_CHECKING:
    from invariants.campaign import Judgement
    from invariants.invariant import Invariant
    from invariants.known import Known
    from invariants.target import Target


@dataclass(frozen=True)
class Plan:
    """What to check: `cases` is the number to draw from `seed`, `known` are files of known violations."""

    spec: str
    cases: int
    seed: int
    known: Sequence[Path]
    only: Sequence[str]
    json: Path | None


def check(plan: Plan, worlds: Worlds) -> int:
    """Judge, print and write what was found; returns the exit status. A user's mistake raises, and nothing starts."""
    at_least_one("--cases", plan.cases)
    out = document.check_writable(plan.json) if plan.json else None
    target = load_target(plan.spec)
    existing = registered()
    invariants = select(existing, plan.only)
    known = _known(plan, target, existing)
    from invariants import campaign
    from invariants.known import fit
    from invariants.store import Store

    cases = campaign.plan(target, plan.cases, plan.seed, worlds.largest)
    fit(known, cases)  # before worlds start
    title = f"checking {target.name}: {len(cases)} cases, seed {plan.seed}"
    with Progress(terminal.console(sys.stderr), title) as progress, worlds.running(target, cases) as (run, folder):
        started = campaign.Campaign(target, cases, plan.seed, progress.counting(run), Store(folder), known)
        started.gather(progress.count)
        judgements = []
        for invariant in invariants:
            progress.say(f"judging {invariant.id}")
            judgements.append(started.judge(invariant))
    status = exit_status(judgement.status for judgement in judgements)
    replays = [_replay(plan.spec, judgement, worlds) for judgement in judgements]
    summary = {"cases": len(cases), "runs": progress.runs, "seconds": round(progress.seconds, 1), "seed": plan.seed}
    _print(judgements, replays, summary)
    for line in _unmatched(known, judgements):
        print(line)
    if out:
        found = _document(plan, target, summary, status, invariants, judgements, replays)
        return document.write_last(out, found, status)
    return status


def _known(plan: Plan, target: Target, ids: Collection[str]) -> list[Known]:
    from invariants.known import read_known

    shipped = [target.known()] if isinstance(target, HasKnown) else []
    return [known for path in (*shipped, *plan.known) for known in read_known(path, ids)]


def _unmatched(known: Sequence[Known], judgements: Sequence[Judgement]) -> Iterator[str]:
    """A line for each entry for an invariant that was judged, and which covered none of its cases."""
    judged = {judgement.invariant for judgement in judgements}
    covered = {entry for judgement in judgements for entry, _ in judgement.known}
    for entry in known:
        if entry.invariant in ("*", *judged) and entry not in covered:
            yield f"known violation of {entry.invariant} where {' '.join(entry.when.split())}: matched no case"


def _replay(spec: str, judgement: Judgement, worlds: Worlds) -> str | None:
    if judgement.verdict is None:
        return None
    return terminal.replay_line(spec, judgement.verdict.case, only=judgement.invariant, also=worlds.options)


def _print(judgements: Sequence[Judgement], replays: Sequence[str | None], summary: dict[str, Any]) -> None:
    console = terminal.console(sys.stdout)
    console.print(terminal.judgement_table(judgements))
    told: dict[str, str] = {}
    for judgement, replay in zip(judgements, replays, strict=True):
        if replay and judgement.status == "unknown" and judgement.verdict:
            first = told.setdefault(judgement.verdict.reason, judgement.invariant)
            if first != judgement.invariant:  # one rank's end is all that several invariants have to tell
                console.print(f"\n{judgement.invariant} is unknown for the reason of {first}", soft_wrap=True)
                continue
        if replay and judgement.status in ("violated", "unknown"):
            console.print("\n" + terminal.failure_text(judgement, replay), soft_wrap=True)
    if any(judgement.status == "unknown" and "was not done after" in judgement.reason for judgement in judgements):
        console.print("\nwhere ranks are slow, or the machine is busy, give them longer: --deadline SECONDS")
    for line in terminal.known_texts(judgements):
        console.print(line, soft_wrap=True)
    console.print("{cases} cases, {runs} runs, {seconds:.1f} s, seed {seed}".format(**summary))


def _document(
    plan: Plan,
    target: Target,
    summary: dict[str, Any],
    status: int,
    invariants: Sequence[Invariant],
    judgements: Sequence[Judgement],
    replays: Sequence[str | None],
) -> dict[str, Any]:
    each = zip(judgements, invariants, replays, strict=True)
    return {
        "command": "check",
        "target": plan.spec,
        "name": target.name,
        **summary,
        "exit_status": status,
        "invariants": [
            document.judgement_document(judgement, invariant.promise, replay) for judgement, invariant, replay in each
        ],
    }
