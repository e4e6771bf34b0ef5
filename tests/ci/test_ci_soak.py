"""`ci/soak` in short: every death is named right and nothing grows; and what is named wrong, or grows, fails."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def soak(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("soak", ROOT / "ci" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


def test_each_death_is_named_right_and_nothing_is_left():
    command = [sys.executable, str(ROOT / "ci" / "soak.py"), "--worlds", "18", "--deadline", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "named wrong: 0" in done.stdout
    assert "left: nothing" in done.stdout
    for death in ("raises", "killed", "suspended", "aborts", "exits", "loops", "shouts", "multiplies", "waits"):
        (row,) = (line for line in done.stdout.splitlines() if f" {death} " in line)
        assert " 2 " in row


def test_a_death_that_is_told_as_another_fails(soak, monkeypatch, capsys):
    monkeypatch.setattr(soak, "DEATHS", [soak.Death(soak.exits, ("died",), "exit status 8")])
    assert soak.main(["--worlds", "2", "--deadline", "20"]) == 1
    output = capsys.readouterr().out
    assert "named wrong: 2" in output
    assert "died: exit status 7" in output


def test_growth_is_of_the_last_worlds_over_the_first(soak):
    tally = soak.Tally()
    tally.footprints = [(70.0, 9)] * 2 + [(100.0, 10)] * 2 + [(105.0, 11)] * 4 + [(120.0, 12)] * 2
    assert tally.growth() == (20.0, 2)
