"""Suites: verdicts as pytest's outcomes, cases run once over all workers, numbers and seeds, mistakes in one line.

Evidence comes from a runner without ranks, so that each verdict can be had at will; `tests/test_impl.py` and the
example plugin's tests run suites on real worlds.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from xml.etree import ElementTree

import pytest

# Loaded here, they stay: what only a session within this process imports goes with it.
import invariants.campaign
import invariants.commands.session
import invariants.known
import invariants.report.terminal
import invariants.runner
import invariants.strategies
import invariants.world.pool  # noqa: F401
from invariants.catalog import BUILT_IN

pytestmark = pytest.mark.usefixtures("_own_plugin")

CONFTEST = """
import os
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

import invariants.profiles
import invariants.runner
from invariants import Evidence, NotApplicable, Promises, Section, Violation, invariant
from invariants.evidence import Loss

pytest_plugins = ["invariants.plugin"]
invariants.profiles.register()
if profile := os.environ.get("TOY_PROFILE"):
    hypothesis.settings.load_profile(profile)


class Runner:
    def __init__(self, pool, target, folder):
        self.target = target

    def __call__(self, case, fault=None):
        with Path(__file__).with_name("runs").open("a") as file:
            file.write(f"{self.target.name} {case}\\n")
        refused = "an odd seed" if case.seed % 2 and self.target.name == "picky" else None
        losses = tuple(Loss(0, step, 1.0, 1.0, 0.5, True) for step in (1, 2, 3))
        return Evidence(self.target.name, case, Promises(), refused=refused, losses=losses, absent=ABSENT)


ABSENT = {section.value: f"the toy has no {section.value}" for section in Section if section is not Section.LOSSES}
invariants.runner.Runner = Runner


@pytest.fixture(scope="session")
def worlds():
    return SimpleNamespace(pool=SimpleNamespace(deadline_s=30.0))


def breaks(evidence):
    '''Microbatches are few.'''
    if (count := evidence.case.microbatches) > 5:
        yield Violation("microbatches", "at most 5", str(count), rank=0, step=1)


def known(evidence):
    '''Never holds.'''
    yield Violation("life", "easy", "hard")


def declines(evidence):
    '''Never applies.'''
    raise NotApplicable("there is nothing to judge")


def crashes(evidence):
    '''Cannot be judged.'''
    return 1 / 0


def always(evidence):
    '''Holds.'''
    return ()


OWN = [("toy.breaks", breaks), ("toy.known", known), ("toy.declines", declines), ("toy.crashes", crashes)]


def pytest_invariants_register(config):
    return [invariant(name, needs=[Section.LOSSES])(function) for name, function in [*OWN, ("toy.holds", always)]]
"""

TARGETS = """
from pathlib import Path

from hypothesis import strategies as st

import invariants


class Toy:
    promises = invariants.Promises()

    def __init__(self, name):
        self.name = name

    def cases(self):
        whole = st.integers(0, 99_999)
        return st.builds(invariants.Case, microbatches=st.integers(1, 9), seed=whole)

    def build(self, case, rank):
        raise NotImplementedError


class Shipping(Toy):
    def known(self):
        return Path(__file__).with_name("known.toml")


class Wrong(Toy):
    def cases(self):
        return st.just(3)


class Leaving(Toy):
    def cases(self):
        raise SystemExit(0)


target = Toy("importable")
"""

KNOWN = """
[[known]]
invariant = "toy.known"
when = "m >= 1"
reason = "life is hard"
report = "https://example.org/1"
"""


@pytest.fixture
def _own_plugin(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), *sys.path]))


@pytest.fixture
def session(pytester):
    """Run suites of the toy; the result, and the cases that were run by target and text."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(toy=TARGETS)
    (pytester.path / "known.toml").write_text(KNOWN)
    (pytester.path / "wrong.toml").write_text(KNOWN.replace("toy.known", "toy.none"))

    def run(suites, *options, profile=""):
        pytester.makepyfile(
            test_toy=f"import invariants\nfrom toy import Leaving, Shipping, Toy, Wrong, target\n{suites}\n"
        )
        runs = pytester.path / "runs"
        runs.unlink(missing_ok=True)
        arguments = ["-p", "no:cacheprovider", *options]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "200")
            if "-n" in options:
                patch.setenv("TOY_PROFILE", profile)
                result = pytester.runpytest_subprocess(*arguments, timeout=300)
            else:
                patch.setattr("invariants.runner.Runner", None)  # the conftest's own, which goes with this context
                patch.setattr("invariants.profiles.loaded", lambda: profile)
                result = pytester.runpytest_inprocess(*arguments)
        return result, Counter(runs.read_text().splitlines() if runs.exists() else ())

    return run


def test_verdicts_are_outcomes(session, pytester):
    suites = "test_toy = invariants.suite(Toy('toy'), cases=9, known=['known.toml'])"
    result, runs = session(suites, "-rA", "--junitxml=junit.xml")
    # Of the built-in ones one passes; one of the toy's own does not apply.
    result.assert_outcomes(passed=2, failed=1, errors=1, xfailed=1, skipped=len(BUILT_IN))
    result.stdout.fnmatch_lines(
        [
            "toy.crashes is unknown",
            "  reason    toy.crashes itself failed: ZeroDivisionError: division by zero",
            "*_ test_toy?toy.breaks? _*",
            "toy.breaks is violated",
            "  case      m=6",
            "  first     rank 0, step 1: microbatches: expected at most 5, observed 6",
            "  replay    pytest 'test_toy.py::test_toy?toy.breaks?' --case m=6",
            "test_toy.py::test_toy: target toy, 9 cases from seed 0, 9 runs, * extra runs to shrink, 0 refused",
            "  known: toy.known: life is hard (https://example.org/1): 9 cases",
        ]
    )
    for line in (
        "PASSED test_toy.py::test_toy?toy.holds?",
        "XFAIL test_toy.py::test_toy?toy.known? - life is hard (https://example.org/1)",
        "SKIPPED * toy.declines is not applicable: there is nothing to judge",
        "SKIPPED * replicas.agree is not applicable: the toy has no replicas",
    ):
        result.stdout.fnmatch_lines([line])
    assert "Traceback" not in result.stdout.str()
    (extra,) = re.findall(r"9 runs, (\d+) extra runs", result.stdout.str())
    assert 0 < int(extra) == sum(runs.values()) - 9
    items = {case.get("name"): case for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")}
    assert items["test_toy[toy.crashes]"].find("error") is not None
    assert items["test_toy[toy.breaks]"].find("failure") is not None
    properties = {each.get("name"): each.get("value") for each in items["test_toy[toy.known]"].iter("property")}
    assert properties["invariants.status"] == "known"
    assert properties["invariants.cases"] == "9"


@pytest.mark.parametrize(
    ("suite", "options"),
    [
        ("invariants.suite(Toy('toy'), known=['known.toml'])", []),
        ("invariants.suite(Shipping('toy'))", []),
        ("invariants.suite(Toy('toy'))", ["-o", "invariants_known=known.toml"]),
    ],
)
def test_known_violations_come_from_the_suite_the_target_and_the_ini(session, suite, options):
    result, _ = session(f"test_a = {suite}", "-k", "toy.known", *options)
    result.assert_outcomes(xfailed=1)
    result, _ = session("test_a = invariants.suite(Toy('toy'))", "-k", "toy.known")
    result.assert_outcomes(failed=1)


def test_an_entry_that_matched_no_case_is_told(session, pytester):
    (pytester.path / "idle.toml").write_text(KNOWN.replace("m >= 1", "m > 9") + KNOWN.replace("toy.known", "*"))
    suite = "test_a = invariants.suite(Toy('toy'), cases=3, known=['idle.toml'])"
    result, _ = session(suite, "-k", "toy.known or toy.holds")
    result.stdout.fnmatch_lines(["  known violation of toy.known where m > 9: matched no case"])
    assert "known violation of *" not in result.stdout.str()
    result, _ = session(suite, "-k", "toy.holds")
    assert "  known violation of * where m >= 1: matched no case" in result.outlines
    result, _ = session(suite, "-k", "toy.known", "--case=m=2")
    assert "matched no case" not in result.stdout.str()


def test_a_target_with_a_name_is_replayed_by_it(session):
    result, _ = session("test_a = invariants.suite(target)", "-k", "breaks", "--backend=gloo")
    line = "  replay    invariants replay toy:target/m=6 --only toy.breaks --backend gloo"
    result.stdout.fnmatch_lines([line])


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("Wrong", "target a: its cases() drew 3; expected an invariants.case.Case"),
        ("Leaving", "target a: drawing from its cases() failed with SystemExit: 0"),
    ],
)
def test_a_target_whose_cases_are_none_is_one_error_a_test(session, target, line):
    result, runs = session(f"test_a = invariants.suite({target}('a'))", "-k", "toy.holds")
    result.assert_outcomes(errors=1)
    assert line in result.outlines
    assert not runs


def test_a_module_that_ends_the_process_ends_no_session_well(session):
    result, _ = session("raise SystemExit(0)\ntest_a = invariants.suite(target)")
    assert result.ret not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def test_what_a_target_refuses_is_counted_and_no_pass(session):
    suites = "test_some = invariants.suite(Toy('picky'), seed=1, cases=8)"
    result, runs = session(suites, "-rs", "-k", "toy.holds")
    result.assert_outcomes(passed=1)
    odd = sum(int(seed) % 2 for seed in re.findall(r"seed=(\d+)", " ".join(runs)))
    assert odd > 0
    result.stdout.fnmatch_lines([f"*: target picky, 8 cases from seed 1, 8 runs, 0 extra*, {odd} refused"])
    result, runs = session(suites, "-rs", "-k", "toy.holds", "--case=seed=1")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*: target picky, 1 case from --case, 1 run, *1 refused"])
    result.stdout.fnmatch_lines(["SKIPPED * toy.holds is refused: an odd seed"])
    assert runs == {"picky seed=1": 1}


def test_two_workers_run_each_case_once(session):
    suites = "test_a = invariants.suite(Toy('a'), cases=9)\ntest_b = invariants.suite(Toy('b'), cases=9)"
    result, runs = session(suites, "-n", "2", "-k", "not breaks and not known")
    assert Counter(runs.values()) == {1: 18}
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["errors"]) == (4, 2)  # loss.finite and toy.holds, toy.crashes
    for name in "ab":
        result.stdout.fnmatch_lines([f"test_toy.py::test_{name}: target {name}, 9 cases from seed 0, 9 runs, 0 extra*"])


def test_two_workers_shrink_on_shared_evidence(session):
    result, runs = session("test_a = invariants.suite(Toy('a'), cases=9)", "-n", "2", "-k", "breaks or known")
    assert result.parseoutcomes()["failed"] == 2
    assert set(runs.values()) == {1}
    result.stdout.fnmatch_lines_random(["  case      m=6", "  case      default"])


@pytest.mark.parametrize(("profile", "count"), [("", 25), ("invariants-dev", 12), ("invariants-ci", 40)])
def test_the_number_of_cases(session, profile, count):
    suites = "test_all = invariants.suite(Toy('all'))\ntest_six = invariants.suite(Toy('six'), cases=6, seed=3)"
    _, runs = session(suites, "-k", "toy.holds", profile=profile)
    assert Counter(line.split()[0] for line in runs) == {"all": count, "six": 6}
    result, given = session(suites, "-k", "toy.holds", "--invariants-cases=3", "--invariants-seed=3", profile=profile)
    assert Counter(line.split()[0] for line in given) == {"all": 3, "six": 3}
    assert {line for line in given if line.startswith("six")} < set(runs)
    assert "repeat with" not in result.stdout.str()


def test_random_profiles_draw_a_seed_for_all_workers_and_tell_it(session):
    suites = "test_all = invariants.suite(Toy('all'))"
    result, runs = session(suites, "-n", "2", "-k", "holds or declines", profile="invariants-dev")
    assert Counter(runs.values()) == {1: 12}
    (option,) = re.findall(r"repeat with (--invariants-seed=\d+)", result.stdout.str())
    _, again = session(suites, "-k", "toy.holds", option, profile="invariants-dev")
    assert again == runs
    _, other = session(suites, "-k", "toy.holds", profile="invariants-dev")
    assert other != runs


@pytest.mark.parametrize(
    ("suites", "line"),
    [
        (
            "test_a = invariants.suite(object())",
            "test_toy.py::test_a: target of the suite: object has no member 'name'",
        ),
        (
            "test_a = invariants.suite(Toy)",
            "test_toy.py::test_a: target of the suite: Toy is a class; name an instance",
        ),
        ("test_a = invariants.suite(Toy('a'), cases=0)", "test_toy.py::test_a: cases=0: expected a whole number"),
        ("test_a = invariants.suite(Toy('a'), seed='x')", "test_toy.py::test_a: seed='x': expected a whole number"),
        ("test_a = invariants.suite(Toy('a'), known=['no.toml'])", "*no.toml*"),
        (
            "test_a = invariants.suite(Toy('a'), known=['wrong.toml'])",
            "*entry 1: invariant 'toy.none' does not exist; *",
        ),
        ("class TestA:\n    test_a = invariants.suite(Toy('a'))", "*::test_a: a suite is a function: assign it at*"),
    ],
)
def test_a_mistake_in_a_suite_is_one_error_of_its_collection(session, suites, line):
    result, runs = session(suites)
    assert result.parseoutcomes() == {"errors": 1}
    result.stdout.fnmatch_lines([f"{line}*"])
    assert "Traceback" not in result.stdout.str()
    assert not runs


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--invariants-cases=0", "ERROR: --invariants-cases=0: expected 1 or more"),
        ("--case=m=x", "ERROR: --case=m=x: case part 'm=x': expected a whole number"),
        ("--case=topology=dp9", "ERROR: --case=topology=dp9: 9 ranks; expected a topology of 8 or fewer"),
    ],
)
def test_a_wrong_option_is_one_line(session, option, line):
    result, runs = session("test_a = invariants.suite(Toy('a'))", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines[0] == line
    assert not runs
