"""Declaring, registering, storing: the concept without any process."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given

from invariants import codec, registry
from invariants.case import Case, Topology
from invariants.errors import UsageError
from invariants.evidence import Evidence, Loss, Reload, Section, State
from invariants.invariant import NotApplicable, Violation, invariant, reasons
from invariants.schedule.compiled import OFF, WORTH_IT, available
from invariants.strategies import cases
from invariants.target import Promises


def declared(body, **kwargs):
    def function(evidence):
        """Something holds."""
        return body(evidence)

    return invariant("own.promise", needs=[Section.LOSSES], **kwargs)(function)


EVIDENCE = Evidence("literal", Case(), Promises(), losses=(Loss(0, 1, None, float("inf"), 1.0, True),))


@given(cases())
def test_a_case_is_short_text_that_reads_back(case):
    assert Case.parse(str(case)) == case
    assert codec.loads(codec.dumps(replace(EVIDENCE, case=case))) == replace(EVIDENCE, case=case)


def test_evidence_keeps_every_section():
    state = State(0, (), (), (("torch", "ab"),), None)
    evidence = replace(EVIDENCE, schedule=(("0F0",), ()), reload=Reload((state,), ()), lost={"resume": "rank 1 died"})
    assert codec.loads(codec.dumps(evidence)) == evidence


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("m", "expected key=value"),
        ("microbatch=2", "unknown key"),
        ("m=2,m=3", "given twice"),
        ("m=two", "a whole number"),
        ("m=0", "expected 1 or more"),
        ("topology=2", "expected a name of letters"),
        ("topology=pp0", "expected a size of 1 or more"),
        ("precision=float8", "expected one of float32, float64"),
        ("optimizer=lion", "expected one of adam"),
        ("history=save", "no step"),
        ("history=1.0", "expected 1 or more each"),
        ("history=1.save.1.save", "one save at most"),
        ("tied=maybe", "yes or no"),
    ],
)
def test_a_case_that_cannot_be_read_is_named(text, named):
    with pytest.raises(UsageError, match=named):
        Case.parse(text)


def test_ranks_and_coordinates_are_inverse():
    topology = Topology.of(pp=2, dp=3)
    assert [topology.rank(**topology.coordinate(rank)) for rank in range(6)] == list(range(6))
    assert topology.peers("pp", 4) == (1, 4)
    assert topology.peers("dp", 4) == (3, 4, 5)
    assert topology.peers("tp", 4) == (4,)


def test_verdicts():
    violation = Violation("value", "1", "2", rank=1, step=2)
    worse = Violation("value", "1", "9", rank=0, step=3, excess=float("inf"))
    found = declared(lambda _: [worse, replace(violation, excess=2.0)]).judge(EVIDENCE)
    assert (found.status, found.first.step, found.worst.step) == ("violated", 2, 3)
    assert str(violation) == "rank 1, step 2: value: expected 1, observed 2"
    assert declared(lambda _: []).judge(EVIDENCE).status == "holds"
    assert declared(lambda _: [], applies=lambda _: "too small").judge(EVIDENCE).reason == "too small"
    assert declared(lambda _: []).judge(replace(EVIDENCE, refused="no")).status == "refused"
    gone = replace(EVIDENCE, losses=None)
    assert declared(lambda _: []).judge(replace(gone, absent={"losses": "none"})).status == "not applicable"
    assert declared(lambda _: []).judge(replace(gone, lost={"losses": "killed"})).reason == "killed"
    assert declared(lambda _: []).judge(gone).status == "unknown"


def test_an_invariant_that_crashes_is_unknown_and_one_may_decline():
    def crash(_):
        raise ZeroDivisionError("by zero")

    def decline(_):
        raise NotApplicable("no replicas")

    assert "ZeroDivisionError: by zero" in declared(crash).judge(EVIDENCE).reason
    assert declared(decline).judge(EVIDENCE).status == "not applicable"


def documented(evidence):
    """Something holds."""


def undocumented(evidence):
    pass


def two(evidence, more):
    """Something holds."""


@pytest.mark.parametrize(
    ("name", "needs", "applies", "function", "named"),
    [
        ("Plain", [Section.LOSSES], len, documented, "dotted lower-case"),
        ("a.b", [], len, documented, "expected a list of one or more of Section.SCHEDULE"),
        ("a.b", ["losses"], len, documented, "Section.LOSSES"),
        ("a.b", [Section.LOSSES], None, documented, "expected a function of the case"),
        ("a.b", [Section.LOSSES], len, 3, "is not a function"),
        ("a.b", [Section.LOSSES], len, two, "must take one argument"),
        ("a.b", [Section.LOSSES], len, undocumented, "no docstring"),
    ],
)
def test_a_wrong_declaration_is_refused_with_what_would_be_right(name, needs, applies, function, named):
    with pytest.raises(UsageError, match=named):
        invariant(name, needs=needs, applies=applies)(function)


def test_the_registry_refuses_doubles_and_strangers():
    own = declared(lambda _: [])
    known = registry.registry([own])
    assert registry.select(known, ["own.promise"]) == (own,)
    assert registry.select(known, []) == tuple(known.values())
    with pytest.raises(UsageError, match="declared twice"):
        registry.registry([own, declared(lambda _: [])])
    with pytest.raises(UsageError, match=r"'nope' does not exist; expected one of schedule\.complete"):
        registry.select(known, ["nope"])
    with pytest.raises(UsageError, match="not an invariant"):
        registry.checked([len], "conftest.py")


def test_the_command_lists_every_invariant():
    command = [sys.executable, "-c", "from invariants.cli import main; main()", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    for item in registry.built_in():
        assert item.id in done.stdout


@pytest.mark.parametrize("cells", [12, WORTH_IT])
def test_numba_is_imported_for_schedules_that_make_up_for_it(monkeypatch, cells):
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    seen = []
    declared(lambda _: seen.append(available()) or ()).judge(replace(EVIDENCE, schedule=(("0F0",) * cells, ())))
    assert seen == [cells == WORTH_IT and find_spec("numba") is not None]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["one rank"], "one rank"),
        (["one rank"] * 3, "one rank"),
        (["one rank", "no message", "no message"], "no message (2 cases); one rank (1 case)"),
        (list("aabbccdde"), "a (2 cases); b (2 cases); c (2 cases); 2 other reasons"),
    ],
)
def test_different_reasons_are_all_told(given, told):
    assert reasons(given) == told
