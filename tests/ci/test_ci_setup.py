"""The set-up that all commands share, on a copy of the scripts and an interpreter that only writes down its calls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = "pip install -c"

# Answers as the real interpreter does, but for its version, `-m venv` (which copies it), `-m pip` and what tests run.
INTERPRETER = """#!{bash}
real={real} version={version} calls={calls}
case "$1 ${{2:-}}" in
    --version*) echo "Python $version" ;;
    "-c "*) exec "$real" -c "import sys; sys.version_info = tuple(map(int, '$version'.split('.'))); $2" ;;
    "-m venv")
        echo "venv $version" >>"$calls"
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        shift; echo "$*" >>"$calls"
        if [[ -n ${{PIP_SLEEPS:-}} ]]; then sleep "$PIP_SLEEPS"; fi
        if [[ -n ${{PIP_FAILS:-}} && $* == *-c* ]]; then seq 100; echo "ERROR: $PIP_FAILS" >&2; exit 1; fi
        printf '#!/bin/sh\\necho "invariants $*"\\nexit 5\\n' >"$(dirname "$0")/invariants"
        chmod +x "$(dirname "$0")/invariants" ;;
    "-m "*) shift; echo "$*" >>"$calls" ;;
esac
"""


class Checkout:
    """A copy of the scripts with an interpreter of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout with space"
        self.calls_file = folder / "calls"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        shutil.copytree(ROOT / "ci", self.root / "ci")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        (self.root / "pyproject.toml").write_text("[project]\n")
        self.interpreter = self.python("3.11.7")

    def python(self, version: str) -> Path:
        """An interpreter of `version`."""
        path = self.temporary.parent / f"python{version}"
        bash = shutil.which("bash")
        path.write_text(INTERPRETER.format(bash=bash, real=sys.executable, version=version, calls=self.calls_file))
        path.chmod(0o755)
        return path

    def start(self, *command: str, **environment: object) -> subprocess.Popen[str]:
        """Start a command in a session of its own; `python` is found as `python3` on the path."""
        tools = self.temporary.parent / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "python3").unlink(missing_ok=True)
        (tools / "python3").symlink_to(self.interpreter)
        given = {key: str(value) for key, value in environment.items()}
        path = f"{tools}:{os.environ['PATH']}"
        return subprocess.Popen(
            [str(self.root / command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"PATH": path, "TMPDIR": str(self.temporary), **given},
            cwd=self.temporary,
        )

    def run(self, *command: str, **environment: object) -> tuple[int, str, str]:
        """Run a command to its end; its exit status, output and errors."""
        process = self.start(*command, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self, *, of: str = "") -> list[str]:
        """Calls of the interpreter so far that start with `of`."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        return [line for line in text.splitlines() if line.startswith(of)]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_first_run_sets_up_and_the_second_does_not(checkout):
    status, out, err = checkout.run("ci/check")
    assert (status, out) == (5, "invariants check impl.target:target\n")
    assert "making .venv with Python 3.11" in err
    assert len(checkout.calls(of=INSTALL)) == 1
    assert f"-e {checkout.root}[dev]" in checkout.calls(of=INSTALL)[0]
    before = checkout.calls()
    assert checkout.run("ci/check") == (5, "invariants check impl.target:target\n", "")
    assert checkout.calls() == before
    assert list(checkout.temporary.iterdir()) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "ci/constraints.txt"])
def test_a_change_of_what_is_asked_for_installs_again_into_the_same_environment(checkout, name):
    checkout.run("ci/check")
    (checkout.root / name).write_text("# changed\n")
    checkout.run("ci/check")
    assert len(checkout.calls(of=INSTALL)) == 2
    assert len(checkout.calls(of="venv")) == 1


def test_another_python_makes_the_environment_anew(checkout):
    checkout.run("ci/check")
    checkout.run("ci/check", PYTHON=checkout.python("3.12.1"))
    assert checkout.calls(of="venv") == ["venv 3.11.7", "venv 3.12.1"]
    checkout.run("ci/check")  # without a wish, what is there serves
    assert len(checkout.calls(of="venv")) == 2


def test_an_environment_that_moved_is_installed_into_again(checkout):
    checkout.run("ci/check")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.run("ci/check")
    assert f"-e {checkout.root}[dev]" in checkout.calls(of=INSTALL)[-1]


@pytest.mark.parametrize("version", ["2.7.18", "3.9.18"])
def test_an_old_python_is_refused(checkout, version):
    status, _, err = checkout.run("ci/test", PYTHON=checkout.python(version))
    assert status == 3
    assert f"is Python {version.rpartition('.')[0]}; set PYTHON to one of 3.10 or newer" in err
    assert not (checkout.root / ".venv").exists()


def test_a_python_that_does_not_exist_is_named(checkout):
    status, _, err = checkout.run("ci/lint", PYTHON="/nowhere/python3")
    assert status == 3
    assert "FAILED at: looking for Python" in err
    assert "/nowhere/python3 does not run" in err


def test_a_failed_step_shows_its_name_the_end_of_its_log_and_what_to_do(checkout):
    status, _, err = checkout.run("ci/test", PIP_FAILS="no matching distribution for torch==0")
    assert status == 3
    assert "FAILED at: pip install" in err
    assert "    ERROR: no matching distribution for torch==0\n" in err
    assert "what to do: see the lines above" in err
    assert "    99\n" in err
    assert "    50\n" not in err
    (log,) = checkout.temporary.iterdir()
    assert str(log) in err
    assert "50\n" in log.read_text()
    assert checkout.calls(of="coverage") == []
    status, _, _ = checkout.run("ci/check")
    assert status == 5


def test_an_interrupted_set_up_starts_over(checkout):
    process = checkout.start("ci/check", PIP_SLEEPS=60)
    until = time.monotonic() + 30
    while not checkout.calls(of="pip"):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    status, _, err = checkout.run("ci/check")
    assert status == 5
    assert "making .venv" in err
    assert len(checkout.calls(of="venv")) == 2


def test_two_commands_at_once_set_up_once(checkout):
    processes = [checkout.start(command, PIP_SLEEPS=0.5) for command in ("ci/check", "ci/check", "ci/lint")]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [5, 5, 0]
    assert len(checkout.calls(of="venv")) == 1
    assert len(checkout.calls(of=INSTALL)) == 1
    assert sum("another command is setting up" in each for each in errors) == 2


def test_a_pin_that_cannot_be_read_is_shown(checkout):
    """With the real interpreter: pip refuses before it asks an index."""
    (checkout.root / "ci/constraints.txt").write_text("torch = = nonsense\n")
    status, _, err = checkout.run("ci/check", PYTHON=sys.executable)
    assert status == 3
    assert "FAILED at: pip install" in err
    assert "nonsense" in err
    assert "ci/constraints.txt" in err
