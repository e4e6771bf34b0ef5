"""A complete package of a third party: installed, listed, judged, and failing like the built-in invariants."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests" / "examples" / "invariants-example-plugin"

SUITES = """
from dataclasses import replace

import impl.target
import invariants


class Liar:
    \"\"\"Trains as `impl` does; each rank adds its number to the loss that it reports.\"\"\"

    def __init__(self, trainer, rank):
        self.trainer, self.rank = trainer, rank

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def step(self, window, observe):
        result = self.trainer.step(window, observe)
        return replace(result, loss=result.loss + self.rank)


class LyingTarget(impl.target.ImplTarget):
    name = "liar"

    def build(self, case, rank):
        return Liar(super().build(case, rank), rank.rank)


test_impl = invariants.suite(impl.target.target)
test_liar = invariants.suite(LyingTarget())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs a command in a folder of its own, with the example installed where Python looks."""
    folder = tmp_path_factory.mktemp("example")
    copy = folder / "source"  # building leaves files beside the sources
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", site, copy], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    path = os.pathsep.join([str(site), str(ROOT), *sys.path])

    def run(*arguments, cwd=copy):
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment, cwd=cwd
        )

    return run


def test_its_own_tests_pass(installed):
    done = installed("-m", "pytest", "-p", "invariants.plugin", "-p", "no:cacheprovider", "-c", os.devnull, "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_it_is_listed_beside_the_built_in_ones(installed):
    done = installed("-c", "from invariants.cli import main; main()", "list")
    assert done.returncode == 0, done.stderr
    assert "losses.agree" in done.stdout
    assert "replicas.agree" in done.stdout
    assert "All ranks that report the loss of a step report the same bits." in done.stdout


def test_it_is_judged_and_fails_like_the_built_in_ones(installed, tmp_path):
    (tmp_path / "test_suites.py").write_text(SUITES)
    options = ["-p", "invariants.plugin", "-p", "no:cacheprovider", "-rA", "--case=topology=dp2,history=1.1"]
    done = installed("-m", "pytest", *options, "-k", "losses.agree or loss.finite", "test_suites.py", cwd=tmp_path)
    text = done.stdout
    assert done.returncode == 1, text + done.stderr
    for name in ("losses.agree", "loss.finite"):
        assert f"PASSED test_suites.py::test_impl[{name}]" in text
        assert f"FAILED test_suites.py::test_liar[{name}]" in text
        assert f"{name} is violated" in text
        assert f"pytest 'test_suites.py::test_liar[{name}]' --case topology=dp2,history=1.1" in text
    assert "rank 1, step 1: reported loss: expected " in text
    assert ", as on rank 0, observed " in text
    assert "Traceback" not in text
