"""Lines that run in ranks count, with the settings of this project, under xdist: a few lines, by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Tracing reaches a function that is called after the fork; the rest of the one that forked stays unseen in the child.
SUBJECT = """\
import os

def on_each_rank(context):
    if context.rank == 1:
        return "one"
    return "other"

def in_a_process_that_ends_at_once(context):
    child = os.fork()
    if child == 0: ends_at_once()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def ends_at_once():
    os._exit(6)

def never(context):
    return "never"
"""

TESTS = """\
import subject

def test_ranks(world):
    assert world.run(subject.on_each_rank) == ["other", "one"]

def test_forked(world):
    assert world.run(subject.in_a_process_that_ends_at_once) == [6, 6]
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Line numbers and branches of SUBJECT that coverage saw, by name, after a run of TESTS."""
    folder = tmp_path_factory.mktemp("coverage")
    (folder / "subject.py").write_text(SUBJECT)
    (folder / "test_subject.py").write_text(TESTS)
    measured = 'source_dirs = ["invariants", "impl"]'
    settings = (ROOT / "pyproject.toml").read_text()
    assert measured in settings
    (folder / "pyproject.toml").write_text(settings.replace(measured, 'source_dirs = ["."]'))
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("COVERAGE", "PYTEST", "COV_"))},
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *sys.path]),
        "COVERAGE_FILE": str(folder / ".coverage"),
    }

    def coverage(*arguments: str) -> None:
        command = [sys.executable, "-m", "coverage", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    plugins = ("-p", "invariants.plugin", "-p", "no:cacheprovider")
    coverage("run", "-m", "pytest", "-n", "2", "--dist=each", *plugins)
    coverage("combine", "--quiet")
    report = folder / "report.json"
    coverage("json", "--fail-under=0", "-o", str(report))
    return json.loads(report.read_text())["files"]["subject.py"]


def test_lines_of_ranks_and_of_what_they_fork_count(counted):
    lines = {number + 1 for number, line in enumerate(SUBJECT.splitlines()) if line}
    missing = {SUBJECT.splitlines().index('    return "never"') + 1}
    assert set(counted["missing_lines"]) == missing
    assert set(counted["executed_lines"]) == lines - missing


def test_branches_of_ranks_count(counted):
    condition = SUBJECT.splitlines().index("    if context.rank == 1:") + 1
    assert [condition, condition + 1] in counted["executed_branches"]
    assert [condition, condition + 2] in counted["executed_branches"]
    assert all(start != condition for start, _ in counted["missing_branches"])
