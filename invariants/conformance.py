"""The kit that the author of an invariant runs on it: quiet where it should be, loud where it should be, and pure.

    def test_my_invariant(pytestconfig):
        check_invariant(my_invariant, holds=[sound], violated=[broken], config=pytestconfig)

`sound` and `broken` are evidence written by hand: `Evidence("literal", Case(), Promises(), losses=(...))`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from invariants import codec
from invariants.errors import UsageError
from invariants.evidence import Evidence, Section
from invariants.invariant import Invariant, Status, Verdict, Violation
from invariants.registry import GROUP, registry

if TYPE_CHECKING:
    import pytest


def check_invariant(
    invariant: Invariant,
    *,
    holds: Sequence[Evidence],
    violated: Sequence[Evidence],
    config: pytest.Config | None = None,
) -> None:
    """Raise `AssertionError` that says which demand on an invariant is not met, and by which evidence.

    It must hold on all of `holds` and be violated on all of `violated`, one of each at least; say the same when asked
    twice and of evidence that was stored and read; leave its evidence as it is; judge without the sections that it does
    not need; and be found by its id. `config` is pytest's, for an invariant that a conftest registers. `UsageError`
    where the arguments are none that can be checked.
    """
    if not isinstance(invariant, Invariant):
        raise UsageError(f"check_invariant: {invariant!r} is not an invariant; decorate it with @invariants.invariant")
    samples: dict[Status, Sequence[Evidence]] = {"holds": holds, "violated": violated}
    for status, given in samples.items():
        if not given:
            raise UsageError(f"check_invariant: {status}=[]: expected evidence of which {invariant.id} says {status!r}")
        for index, evidence in enumerate(given):
            _check_sample(invariant, evidence, status, f"{invariant.id} on {status}[{index}]")
    _check_registered(invariant, config)


def _check_sample(invariant: Invariant, evidence: Evidence, status: Status, name: str) -> None:
    before = codec.dumps(evidence)
    verdict = invariant.judge(evidence)
    _demand(verdict.status == status, f"{name}: expected {status!r}, observed {_told(verdict)}")
    for violation in verdict.violations:
        _check_violation(violation, name)
    _demand(codec.dumps(evidence) == before, f"{name}: it changes its evidence, which others judge as well")
    again = invariant.judge(evidence)
    _demand(again == verdict, f"{name}: asked twice, it says {_told(verdict)}, then {_told(again)}")
    stored = invariant.judge(codec.loads(before))
    _demand(stored == verdict, f"{name}: it says {_told(verdict)}, and of the same evidence, stored, {_told(stored)}")
    for section in Section:
        if section not in invariant.needs:
            gone: dict[str, Any] = {section.value: None}
            without = invariant.judge(replace(evidence, **gone))
            remedy = "add the section to its needs, or do without"
            problem = f"{name}, without Section.{section.name}, which it does not need: {without.reason}; {remedy}"
            _demand(without.status != "unknown", problem)


def _check_violation(violation: object, name: str) -> None:
    _demand(isinstance(violation, Violation), f"{name}: it yields {violation!r}; expected an invariants.Violation")
    assert isinstance(violation, Violation)
    for field in ("what", "expected", "observed"):
        text = getattr(violation, field)
        _demand(isinstance(text, str) and bool(text), f"{name}: violation with {field}={text!r}; expected some text")
    _demand(not math.isnan(violation.excess), f"{name}: violation with excess=nan, which cannot be ordered")


def _check_registered(invariant: Invariant, config: pytest.Config | None) -> None:
    own: tuple[Invariant, ...] = ()
    if config is not None:
        from invariants.hookspecs import registered

        own = registered(config.hook.pytest_invariants_register, config)
    problem = (
        f"{invariant.id} is not registered: name it in an entry point of group {GROUP!r} and install the package, or "
        "return it from pytest_invariants_register in a conftest and hand pytest's config to check_invariant"
    )
    _demand(registry(own).get(invariant.id) is invariant, problem)


def _demand(met: bool, problem: str) -> None:
    __tracebackhide__ = True
    if not met:
        raise AssertionError(problem)


def _told(verdict: Verdict) -> str:
    shown = [verdict.reason, *map(str, verdict.violations[:3])]
    return ": ".join([verdict.status, *filter(None, shown)])
