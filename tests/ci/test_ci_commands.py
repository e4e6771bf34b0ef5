"""What the commands hand on, and to whom; the set-up has been done, by a stamp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("ci/check", "ci/test", "ci/lint", "ci/gate", "ci/setup.sh", ".ci/run")
RECORD = """#!/bin/sh
name=$(basename "$0")
[ "$1" = --version ] && exec echo Python 3.11.7
echo "$name $*"
case "$*" in *"$FAILS"*) exit "$STATUS" ;; esac
"""


@pytest.fixture
def run(tmp_path):
    """Run a command of a copy whose environment only repeats what it is asked to do."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "ci", root / "ci")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    (root / "pyproject.toml").touch()
    (root / ".venv/bin").mkdir(parents=True)
    for name in ("python", "invariants"):
        path = root / ".venv/bin" / name
        path.write_text(RECORD)
        path.chmod(0o755)
    state = f". ci/setup.sh; state >{root}/.venv/set-up.stamp"
    subprocess.run(["bash", "-c", state], cwd=root, check=True, timeout=30)

    def run(*command: str, fails: str = "nothing", status: int = 1) -> tuple[int, list[str]]:
        done = subprocess.run(
            [root / command[0], *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "FAILS": fails, "STATUS": str(status), "TMPDIR": str(tmp_path)},
        )
        return done.returncode, (done.stdout + done.stderr).splitlines()

    return run


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        ([], "check impl.target:target"),
        (["torch"], "check torch"),
        (["my.target:target", "--cases", "3"], "check my.target:target --cases 3"),
        (["--cases", "3"], "check impl.target:target --cases 3"),
        (["torch", "--known", "known violations.json"], "check torch --known known violations.json"),
    ],
)
def test_check_judges_the_default_or_the_target_given(run, given, handed_on):
    assert run("ci/check", *given) == (0, [f"invariants {handed_on}"])


@pytest.mark.parametrize("status", [1, 2, 3, 5])
@pytest.mark.parametrize("command", ["ci/check", "ci/gate"])
def test_the_verdict_is_the_exit_status(run, command, status):
    assert run(command, "torch", fails="check torch", status=status)[0] == status


def test_gate_hands_everything_on(run):
    assert run("ci/gate", "a:b", "--known", "k", "--json", "o") == (0, ["invariants check a:b --known k --json o"])


@pytest.mark.parametrize("given", [[], ["--known", "k"]])
def test_gate_without_a_target_says_how_it_is_called(run, given):
    status, lines = run("ci/gate", *given)
    assert status == 2
    assert lines[0].startswith("usage: ci/gate TARGET")


def test_a_whole_test_run_holds_coverage_to_its_limit(run):
    status, lines = run("ci/test")
    assert status == 0
    assert lines[0] == "python -m coverage run -m pytest -n auto --dist worksteal"
    assert lines[1].startswith("python -m coverage combine")
    assert lines[2] == "python -m coverage report"


def test_selected_tests_show_coverage_without_a_limit(run):
    status, lines = run("ci/test", "tests/impl", "-k", "a or b")
    assert status == 0
    assert lines[0] == "python -m coverage run -m pytest -n auto --dist worksteal tests/impl -k a or b"
    assert lines[2] == "python -m coverage report --fail-under=0"


@pytest.mark.parametrize(("fails", "status"), [("-m pytest", 1), ("-m pytest", 5), ("coverage report", 2)])
def test_test_fails_with_the_status_of_what_failed(run, tmp_path, fails, status):
    assert run("ci/test", fails=fails, status=status)[0] == status
    assert [path.name for path in tmp_path.iterdir()] == ["checkout"]


def test_lint_runs_everything_and_fails_if_anything_does(run):
    status, lines = run("ci/lint", fails="ruff check")
    assert status == 1
    called = [line for line in lines if line.startswith("python")]
    assert called == [
        "python -m ruff check .",
        "python -m ruff format --check .",
        "python -m mypy",
        "python -m pytest -q tests/test_import_rules.py",
    ]


@pytest.mark.parametrize(("fails", "status"), [("nothing", 0), ("mypy", 1), ("-n auto", 1)])
def test_continuous_integration_runs_both_and_fails_if_one_does(run, fails, status):
    code, lines = run(".ci/run", fails=fails)
    assert code == status
    assert "python -m mypy" in lines
    assert "python -m coverage run -m pytest -n auto --dist worksteal" in lines


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_sound(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True, timeout=30)
    assert script.endswith(".sh") or os.access(ROOT / script, os.X_OK)
    if shutil.which("shellcheck"):
        command = ["shellcheck", "-x", script]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout
