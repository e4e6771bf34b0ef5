"""When loops are compiled, and when numba is not even imported."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from invariants.schedule.compiled import OFF, WORTH_IT, available, only_where_it_pays


def test_the_variable_keeps_numba_out(monkeypatch):
    monkeypatch.delenv(OFF, raising=False)
    assert available() == (find_spec("numba") is not None)
    monkeypatch.setenv(OFF, "1")
    assert not available()


@pytest.mark.parametrize(("actions", "left_out"), [(0, True), (WORTH_IT - 1, True), (WORTH_IT, False)])
def test_too_few_actions_are_not_worth_the_import(monkeypatch, actions, left_out):
    monkeypatch.delenv(OFF, raising=False)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    usual = available()
    with only_where_it_pays(actions):
        assert available() == (usual and not left_out)
    assert available() == usual


def test_what_is_imported_already_is_used(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.delenv(OFF, raising=False)
    with only_where_it_pays(1):
        assert available()


@pytest.mark.parametrize(("sizes", "imported"), [("--pp 4 -m 8", False), ("--pp 64 -m 512", True)])
def test_the_command_imports_numba_for_large_schedules_only(sizes, imported):
    pytest.importorskip("numba")
    script = (
        "import contextlib, sys\n"
        "from invariants.cli import main\n"
        f"sys.argv = 'invariants schedule 1f1b {sizes} --transport blocking'.split()\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == str(imported), done.stderr
