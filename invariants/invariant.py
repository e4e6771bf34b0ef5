"""The concept: an invariant is a pure function from evidence to violations, declared by one decorator."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from invariants.case import Case
from invariants.errors import UsageError
from invariants.evidence import Evidence, Section

Status = Literal["holds", "violated", "not applicable", "refused", "unknown"]


@dataclass(frozen=True)
class Violation:
    """One place where a promise is broken. `excess` orders violations: the error as a multiple of its tolerance."""

    what: str
    expected: str
    observed: str
    rank: int | None = None
    step: int | None = None
    stage: int | None = None
    tensor: str | None = None
    excess: float = float("inf")

    def __str__(self) -> str:
        places = (("rank", self.rank), ("step", self.step), ("stage", self.stage), ("tensor", self.tensor))
        where = ", ".join(f"{name} {value}" for name, value in places if value is not None)
        return f"{where}: {self.what}: expected {self.expected}, observed {self.observed}".removeprefix(": ")


@dataclass(frozen=True)
class Verdict:
    """What an invariant says of one case."""

    invariant: str
    case: Case
    status: Status
    reason: str = ""
    violations: tuple[Violation, ...] = ()

    @property
    def first(self) -> Violation:
        """The earliest violation: lowest step, then in the order in which they were found."""
        return min(self.violations, key=lambda v: -1 if v.step is None else v.step)

    @property
    def worst(self) -> Violation:
        """The violation furthest beyond its tolerance."""
        return max(self.violations, key=lambda v: v.excess)


def always(_case: Case) -> str | None:
    """Applies to every case."""
    return None


@dataclass(frozen=True)
class Invariant:
    """A declared invariant; made by the decorator `invariant`."""

    id: str
    needs: tuple[Section, ...]
    applies: Callable[[Case], str | None]
    function: Callable[[Evidence], Iterable[Violation]]

    @property
    def promise(self) -> str:
        """The first paragraph of its documentation, on one line."""
        paragraph = (inspect.getdoc(self.function) or "").split("\n\n")[0]
        return " ".join(paragraph.split())

    def judge(self, evidence: Evidence) -> Verdict:
        """Judge one case; an invariant that crashes, or lacks evidence that got lost, is `unknown`."""

        def verdict(status: Status, reason: str = "", violations: tuple[Violation, ...] = ()) -> Verdict:
            return Verdict(self.id, evidence.case, status, reason, violations)

        if evidence.refused is not None:
            return verdict("refused", evidence.refused)
        if reason := self.applies(evidence.case):
            return verdict("not applicable", reason)
        names = [section.value for section in self.needs]
        for name in names:
            if name in evidence.absent:
                return verdict("not applicable", evidence.absent[name])
        for name in names:
            if getattr(evidence, name) is None:
                return verdict("unknown", evidence.lost.get(name, f"section {name} was not recorded"))
        from invariants.schedule.compiled import only_where_it_pays

        try:
            with only_where_it_pays(sum(map(len, evidence.schedule or ()))):
                violations = tuple(self.function(evidence))
        except NotApplicable as declined:
            return verdict("not applicable", str(declined))
        except UsageError as error:  # what was recorded cannot be read
            return verdict("unknown", str(error))
        except Exception as error:
            return verdict("unknown", f"{self.id} itself failed: {type(error).__name__}: {error}")
        return verdict("violated" if violations else "holds", violations=violations)


class NotApplicable(Exception):
    """Raised inside an invariant where the evidence, not the case, shows that it does not apply; says why."""


_ID = re.compile(r"[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)+")


def invariant(
    id: str,  # noqa: A002 - the field's own word, and part of the public interface
    *,
    needs: Sequence[Section],
    applies: Callable[[Case], str | None] = always,
) -> Callable[[Callable[[Evidence], Iterable[Violation]]], Invariant]:
    """Declare an invariant.

    `id` is a dotted lower-case name, `needs` lists the sections of evidence that the function reads, `applies` returns
    None where a case can be judged, else the reason why not. The function takes the evidence and yields violations; its
    documentation states the promise. A wrong declaration raises `UsageError` saying what would be right.
    """

    def declare(function: Callable[[Evidence], Iterable[Violation]]) -> Invariant:
        for problem in _problems(id, needs, applies, function):
            raise UsageError(f"invariant {id!r}: {problem}")
        return Invariant(id, tuple(needs), applies, function)

    return declare


def _problems(id: object, needs: object, applies: object, function: object) -> Iterable[str]:  # noqa: A002
    if not isinstance(id, str) or not _ID.fullmatch(id):
        yield "the id must be dotted lower-case words, for example 'replicas.agree'"
    known = ", ".join(f"Section.{section.name}" for section in Section)
    if not isinstance(needs, (list, tuple)) or not needs or not all(isinstance(n, Section) for n in needs):
        yield f"needs={needs!r}: expected a list of one or more of {known}"
    if not callable(applies):
        yield f"applies={applies!r}: expected a function of the case that returns None or a reason"
    if not inspect.isfunction(function):
        yield f"{function!r} is not a function of the evidence"
    elif len(inspect.signature(function).parameters) != 1:
        yield f"{function.__name__}{inspect.signature(function)} must take one argument, the evidence"
    elif not (function.__doc__ or "").strip():
        yield f"{function.__name__} has no docstring; its first paragraph is the promise that `invariants list` shows"


def reasons(given: Iterable[str]) -> str:
    """Different reasons in one line, the most frequent first, with their numbers; at most three of them."""
    counts = Counter(given)
    if len(counts) == 1:
        return next(iter(counts))
    told = [
        f"{reason} ({number} cases)" if number > 1 else f"{reason} (1 case)" for reason, number in counts.most_common(3)
    ]
    return "; ".join(told + ([f"{len(counts) - 3} other reasons"] if len(counts) > 3 else []))
