"""`pytest_invariants_register`: who is asked, what is refused, and how commands outside of pytest see it."""

from __future__ import annotations

import sys

import pytest

from invariants.errors import UsageError
from invariants.project import conftest_invariants

HEAD = """
from invariants import Section, invariant


def declared(name):
    @invariant(name, needs=[Section.LOSSES])
    def function(evidence):
        '''It holds.'''
        return ()

    return function


"""

SUITE = """
import invariants


class Toy:
    name = "toy"
    promises = invariants.Promises()

    def cases(self):
        raise NotImplementedError

    build = cases


test_toy = invariants.suite(Toy())
"""


@pytest.fixture
def collect(pytester):
    """Collect suites in two folders, each with a conftest below the root's; lines of the report."""

    def run(root, **below):
        pytester.makeconftest(f"pytest_plugins = ['invariants.plugin']\n{HEAD}{root}")
        for name in ("one", "two"):
            folder = pytester.mkdir(name)
            (folder / f"test_{name}.py").write_text(SUITE)
            if name in below:
                (folder / "conftest.py").write_text(HEAD + below[name])
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q", "--import-mode=importlib")

    return run


def test_a_conftest_is_asked_for_the_suites_below_it(collect):
    result = collect(
        "def pytest_invariants_register(config): return [declared('own.root')]",
        one="def pytest_invariants_register(config): return (declared(name) for name in ['own.one', 'own.uno'])",
    )
    assert result.ret == 0
    for folder, invariant, judged in (
        ("one", "own.root", True),
        ("one", "own.one", True),
        ("one", "own.uno", True),
        ("one", "replicas.agree", True),
        ("two", "own.root", True),
        ("two", "replicas.agree", True),
        ("two", "own.one", False),
    ):
        line = f"{folder}/test_{folder}.py::test_toy[{invariant}]"
        assert (line in result.outlines) is judged, line


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return [declared('replicas.agree')]", "invariant 'replicas.agree' is declared twice"),
        ("return [len]", "pytest_invariants_register of *conftest.py: <built-in function len> is not an invariant"),
        ("return declared('own.one')", "pytest_invariants_register of *conftest.py: Invariant(*: expected a list"),
        ("return 3", "pytest_invariants_register of *conftest.py: 3: expected a list of invariants"),
    ],
)
def test_what_is_no_invariant_is_refused_by_name(collect, body, named):
    result = collect(f"def pytest_invariants_register(config): {body}")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines([f"one/test_one.py::test_toy: {named}*"])


def test_an_implementation_with_other_arguments_is_refused_by_pytest(collect):
    assert collect("def pytest_invariants_register(konfig): return []").ret != 0


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder whose conftest may be read; what that leaves in this interpreter goes with the test."""
    monkeypatch.delitem(sys.modules, "conftest", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return pytester


def test_commands_see_the_conftest_of_the_folder_and_those_above(project):
    project.makeconftest(HEAD + "def pytest_invariants_register(config): return [declared('own.root')]")
    project.makeini("[pytest]\naddopts = --option-of-a-plugin-that-is-not-there")
    project.mkdir("below").joinpath("test_nothing.py").write_text("raise SystemError('collected')")
    for folder in (project.path, project.path / "below"):
        assert [each.id for each in conftest_invariants(folder)] == ["own.root"]


def test_commands_do_without_a_conftest(project):
    assert conftest_invariants(project.path) == ()


def test_a_conftest_that_cannot_be_read_is_an_error_of_its_user(project, capsys):
    project.makeconftest("import a_module_that_is_not_there")
    with pytest.raises(UsageError, match="cannot load the conftest of"):
        conftest_invariants(project.path)
    assert "No module named 'a_module_that_is_not_there'" in capsys.readouterr().err
    project.makeconftest("def pytest_invariants_register(config): return [3]")
    with pytest.raises(UsageError, match="3 is not an invariant"):
        conftest_invariants(project.path)
