"""Lines that run in ranks count, with the settings of this project, under xdist: a few lines, by hand."""

from __future__ import annotations

import json
import os
import re
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
import os
import subject

def test_ranks(world):
    assert world.run(subject.on_each_rank) == ["other", "one"]

def test_processes(world):
    with open("pids", "a") as file:
        print(os.getppid(), os.getpid(), *world.run(lambda context: os.getpid()), file=file)

def test_forked(world):
    assert world.run(subject.in_a_process_that_ends_at_once) == [6, 6]
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Of a run of TESTS: what coverage saw of SUBJECT; numbers of its processes; of those that wrote a file of data."""
    folder = tmp_path_factory.mktemp("coverage")
    (folder / "subject.py").write_text(SUBJECT)
    (folder / "test_subject.py").write_text(TESTS)
    sources = 'source_dirs = ["invariants", "impl"]'
    settings = (ROOT / "pyproject.toml").read_text()
    assert sources in settings
    (folder / "pyproject.toml").write_text(settings.replace(sources, 'source_dirs = ["."]'))
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
    wrote = {int(part) for path in folder.glob(".coverage.*") for part in re.findall(r"\bpid(\d+)\b", path.name)}
    coverage("combine", "--quiet")
    report = folder / "report.json"
    coverage("json", "--fail-under=0", "-o", str(report))
    pids = {int(number) for number in (folder / "pids").read_text().split()}
    return json.loads(report.read_text())["files"]["subject.py"], pids, wrote


@pytest.fixture
def counted(measured):
    """Line numbers and branches of SUBJECT that coverage saw, by name."""
    return measured[0]


def test_h26_every_worker_and_every_rank_writes_its_data(measured):
    """https://github.com/pytorch/rl/pull/3972"""
    _, pids, wrote = measured
    assert len(pids) == 1 + 2 + 4  # the session, its workers, two ranks of each
    assert pids <= wrote


def test_h25_lines_of_ranks_and_of_what_they_fork_count(counted):
    """https://github.com/coveragepy/coveragepy/issues/1050"""
    lines = {number + 1 for number, line in enumerate(SUBJECT.splitlines()) if line}
    missing = {SUBJECT.splitlines().index('    return "never"') + 1}
    assert set(counted["missing_lines"]) == missing
    assert set(counted["executed_lines"]) == lines - missing


def test_branches_of_ranks_count(counted):
    condition = SUBJECT.splitlines().index("    if context.rank == 1:") + 1
    assert [condition, condition + 1] in counted["executed_branches"]
    assert [condition, condition + 2] in counted["executed_branches"]
    assert all(start != condition for start, _ in counted["missing_branches"])
