"""`invariants replay`: run one case, judge it, and show all that is violated."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from invariants.case import Case
from invariants.commands.session import Worlds, exit_status, faults_of, registered
from invariants.errors import UsageError
from invariants.loading import load_target
from invariants.registry import select
from invariants.report import terminal
from invariants.report.progress import Progress


def replay(text: str, fault: str | None, only: Sequence[str], worlds: Worlds) -> int:
    """Judge the case that `text`, SPEC/CASE, names; known violations are violations here. Returns the exit status."""
    spec, slash, case_text = text.partition("/")
    if not slash:
        raise UsageError(f"{text!r}: expected SPEC/CASE, for example torch/topology=pp2.dp2,m=4, or torch/default")
    case = Case.parse(case_text)
    worlds.allow(case)
    target = load_target(spec)
    planted = faults_of(target, [fault])[fault] if fault else None
    invariants = select(registered(), only)
    console = terminal.console(sys.stdout)
    with (
        Progress(terminal.console(sys.stderr), f"replaying {spec}/{case}") as progress,
        worlds.running(target, [case]) as (run, _),
    ):
        evidence = progress.counting(run)(case, fault)
    verdicts = [invariant.judge(evidence) for invariant in invariants]
    for verdict in verdicts:
        console.print(terminal.verdict_text(verdict), soft_wrap=True)
    if planted and not planted.applies(case):
        console.print(f"note: fault {fault} says of itself that it changes nothing in this case", soft_wrap=True)
    return exit_status(verdict.status for verdict in verdicts)
