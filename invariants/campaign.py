"""A campaign: the planned cases of a target, each run once, judged from stored evidence; only violations shrink."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from invariants.case import Case
from invariants.errors import UsageError
from invariants.evidence import Evidence
from invariants.invariant import Invariant, Verdict, reasons
from invariants.known import Known, fit
from invariants.store import Run, Store
from invariants.target import Target

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

MAX_WORLD = 8
"""Ranks of the largest world that a plan starts, unless more are allowed."""

_PATIENCE = 100
"""Draws in a row without a new case after which a domain counts as exhausted."""

_BUFFER_BYTES = 8192
"""Bytes from which one case is drawn: Hypothesis reads no more from any input."""

Progress = Callable[[int, int], None]
"""Told how many of how many planned cases have their evidence."""


def plan(target: Target, count: int, seed: int, max_world: int = MAX_WORLD) -> tuple[Case, ...]:
    """Draw at most `count` different cases of the target, of at most `max_world` ranks each; nothing is run.

    The same arguments give the same cases in every process, a larger `count` adds to the cases of a smaller one, and
    global random generators keep their state. Fewer than `count` come from a domain that is smaller. `UsageError` where
    none is left, or the target's `cases` fails.
    """
    if count < 1:
        raise UsageError(f"cases={count}: expected 1 or more")
    found: dict[Case, None] = {}
    worlds = []
    idle = 0
    for _, case in _draws(target, seed):
        if case is not None:
            worlds.append(case.topology.world_size)
        if case is None or case in found or worlds[-1] > max_world:
            idle += 1
        else:
            found[case] = None
            idle = 0
        if len(found) == count or idle == _PATIENCE:
            break
    if not found and worlds:
        raise UsageError(
            f"target {target.name}: every case needs more than the {max_world} ranks that are allowed; "
            f"allow {min(worlds)} or more (--max-world)"
        )
    if not found:
        raise UsageError(f"target {target.name}: cases() drew nothing in {_PATIENCE} attempts; loosen its filters")
    return tuple(found)


@dataclass(frozen=True)
class Judgement:
    """What a campaign says of one invariant.

    `violated` beats `unknown` beats `holds` (of one case at least) beats `known` beats `refused` beats `not
    applicable`. `reason` is one line, for all but `holds`. `counts` has the planned cases by status, those that are
    `known` counted as that. `verdict` is that of the shrunk case for `violated`, of the first such case for `unknown`.
    `known` has the entries that covered planned cases, and how many. `extra_runs` were made to shrink.
    """

    invariant: str
    status: Literal["holds", "violated", "not applicable", "refused", "unknown", "known"]
    reason: str
    counts: Mapping[str, int]
    verdict: Verdict | None
    known: tuple[tuple[Known, int], ...]
    extra_runs: int


class Campaign:
    """Planned cases of one target and their evidence."""

    def __init__(
        self,
        target: Target,
        cases: Sequence[Case],
        seed: int,
        run: Run,
        store: Store,
        known: Sequence[Known] = (),
        shrink_runs: int = 60,
    ) -> None:
        """`seed` is the one that `cases` were planned with; `shrink_runs` bounds the extra runs of one `judge`.

        A known violation whose `when` does not fit a planned case raises `UsageError` here, before anything runs.
        """
        self.target = target
        self.cases = tuple(cases)
        self.seed = seed
        self.run = run
        self.store = store
        self.known = tuple(known)
        self.shrink_runs = shrink_runs
        self._evidence: dict[Case, Evidence] = {}
        fit(self.known, self.cases)

    def gather(self, progress: Progress = lambda _done, _total: None) -> None:
        """Get the evidence of every planned case: run what nobody runs, then wait for what others run.

        Waiting is bounded by the store, which raises `WorldError`.
        """
        missing = [case for case in self.cases if case not in self._evidence]
        # First round without waiting: other workers are at some cases, this one takes those that are free.
        for wait in (False, True):
            for case in missing:
                evidence = self._evidence.get(case) or self.store.fetch(case, None, self.run, wait=wait)
                if evidence is not None and case not in self._evidence:
                    self._evidence[case] = evidence
                    progress(len(self._evidence), len(self.cases))

    def judge(self, invariant: Invariant) -> Judgement:
        """Judge every planned case, after gathering its evidence; shrink the first violation that is not known."""
        self.gather()
        verdicts = [invariant.judge(self._evidence[case]) for case in self.cases]
        entries = [self._known(verdict) for verdict in verdicts]
        covered = Counter(entry for entry in entries if entry)
        by_status: dict[str, list[Verdict]] = {}
        for verdict, entry in zip(verdicts, entries, strict=True):
            by_status.setdefault("known" if entry else verdict.status, []).append(verdict)

        def judgement(status: Any, reason: str, verdict: Verdict | None = None, extra_runs: int = 0) -> Judgement:
            counts = {name: len(each) for name, each in by_status.items()}
            return Judgement(invariant.id, status, reason, counts, verdict, tuple(covered.items()), extra_runs)

        if violated := by_status.get("violated"):
            search = _Search(self, invariant, violated[0])
            smallest = search.smallest()
            reason = f"{len(violated)} of {len(verdicts)} cases; {_line(str(smallest.first))}"
            return judgement("violated", reason, smallest, search.runs)
        if unknown := by_status.get("unknown"):
            return judgement("unknown", _line(unknown[0].reason), unknown[0])
        if "holds" in by_status:
            return judgement("holds", "")
        if covered:
            return judgement("known", "; ".join(f"{_line(entry.reason)} ({entry.report})" for entry in covered))
        for status in ("refused", "not applicable"):
            if status in by_status:
                return judgement(status, reasons(_line(verdict.reason) for verdict in by_status[status]))
        return judgement("not applicable", "no case was planned")

    def _known(self, verdict: Verdict) -> Known | None:
        """The first entry that expects the verdict."""
        return next((entry for entry in self.known if entry.covers(verdict)), None)


class _Violated(Exception):
    """Tells Hypothesis that a case is one to shrink to."""


class _Stopped(BaseException):
    """Carries an error of ours through Hypothesis, which would take any `Exception` for a violation."""


class _Search:
    """The search for the smallest case that violates an invariant, from one that does."""

    def __init__(self, campaign: Campaign, invariant: Invariant, start: Verdict) -> None:
        self.campaign = campaign
        self.invariant = invariant
        self.start = start
        self.runs = 0
        self.left = campaign.shrink_runs
        self.largest = max(case.topology.world_size for case in campaign.cases)
        # A case is decided once: Hypothesis calls a predicate that changes its mind flaky.
        self.verdicts: dict[Case, Verdict | None] = {start.case: start}

    def smallest(self) -> Verdict:
        """The verdict of the smallest violating case found; at worst the first one's."""
        campaign = self.campaign
        # No planned case is further into the draws, see `plan`.
        draws = islice(_draws(campaign.target, campaign.seed), _PATIENCE * len(campaign.cases))
        buffer = next((buffer for buffer, case in draws if case == self.start.case), None)
        if buffer is None:
            return self.start
        best = self.start

        def visit(case: Case) -> None:
            nonlocal best
            if verdict := self.violation(case):
                best = verdict
                raise _Violated

        from hypothesis.database import InMemoryExampleDatabase

        # What is drawn from the bytes and violates goes into the database, from where the call shrinks it.
        search = _draw_into(visit, campaign.target, campaign.seed, InMemoryExampleDatabase())
        try:
            with _naming_failures(campaign.target), suppress(_Violated):
                search.hypothesis.fuzz_one_input(buffer)
            with _naming_failures(campaign.target), suppress(_Violated):
                search()
        except _Stopped as stopped:
            raise (stopped.__cause__ or stopped) from None
        return best

    def violation(self, case: Case) -> Verdict | None:
        """The verdict of a case that violates the invariant in a way that is not known."""
        if case not in self.verdicts:
            try:
                self.verdicts[case] = self._judge(case)
            except Exception as error:
                raise _Stopped from error
        return self.verdicts[case]

    def _judge(self, case: Case) -> Verdict | None:
        campaign = self.campaign
        evidence = campaign._evidence.get(case)
        if evidence is None:
            if self.left == 0 or case.topology.world_size > self.largest:
                return None
            # Counted even if another worker has run it: the outcome must not depend on who was first.
            self.left -= 1
            evidence = campaign.store.fetch(case, None, self._run, purpose="shrink")
        verdict = self.invariant.judge(evidence) if evidence else None
        if verdict is None or verdict.status != "violated" or campaign._known(verdict):
            return None
        return verdict

    def _run(self, case: Case, fault: str | None) -> Evidence:
        self.runs += 1
        return self.campaign.run(case, fault)


def _line(reason: str) -> str:
    return next(iter(reason.splitlines()), "")


def _draws(target: Target, seed: int) -> Iterator[tuple[bytes, Case | None]]:
    """Without end: bytes, and the case that they give, or None where the target's filters reject it.

    Hypothesis's own search for examples is no plan: it draws constants that it finds in the modules that a process
    happens to have imported. What it draws from given bytes depends on nothing else.
    """
    cases: list[Case] = []
    stream = random.Random(seed)
    with _naming_failures(target):
        draw = _draw_into(cases.append, target, seed, None).hypothesis.fuzz_one_input
        buffer = bytes(_BUFFER_BYTES)  # the simplest case comes first
        while True:
            cases.clear()
            draw(buffer)
            yield buffer, (cases[0] if cases else None)
            buffer = stream.randbytes(_BUFFER_BYTES)


@contextmanager
def _naming_failures(target: Target) -> Iterator[None]:
    """What fails in a target's `cases`, and an exit too, is a user's mistake."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        headline = _line(f"{type(error).__name__}: {error}")
        raise UsageError(f"target {target.name}: drawing from its cases() failed with {headline}") from error


def _draw_into(visit: Callable[[Case], None], target: Target, seed: int, database: ExampleDatabase | None) -> Any:
    """A Hypothesis test that hands cases to `visit`; each setting is given, so that no profile changes what it does."""
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import seed as seeded

    @settings(
        phases=[Phase.reuse, Phase.shrink],
        database=database,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        backend="hypothesis",
    )
    @seeded(seed)  # inside the settings: it takes their database away
    @given(target.cases())
    def draw(case: Case) -> None:
        if not isinstance(case, Case):
            raise UsageError(f"target {target.name}: its cases() drew {case!r}; expected an invariants.case.Case")
        visit(case)

    return draw
