"""The pytest side: options, marker, examples, and nothing left behind, whatever ends the session."""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("_own_plugin")


@pytest.fixture
def _own_plugin(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytester.makeconftest("pytest_plugins = ['invariants.plugin']")


ALL = """
import os, time, warnings
import pytest
from hypothesis import given, settings, strategies as st

seen = []

def remember(context, number):
    import torch
    torch.set_default_dtype(torch.float64)
    context.state.setdefault("numbers", []).append(number)
    return context.state["numbers"], os.getpid(), str(torch.ones(1).dtype)

@given(number=st.integers())
@settings(max_examples=20)
@pytest.mark.worlds(1, 2)
def test_each_example_is_clean_and_late(world, number):
    time.sleep(0.25 if not seen else 0)  # above Hypothesis's own deadline
    seen.append(number)
    results = world.run(remember, number)
    assert [numbers for numbers, _, _ in results] == [[number]] * world.size
    assert {pid for _, pid, _ in results} == set(world.pids)

@pytest.mark.worlds(1, 2)
def test_next(world):
    assert world.run(lambda context: (context.state, str(__import__("torch").ones(1).dtype))) == [
        ({}, "torch.float32")
    ] * world.size

class TestMethod:
    @given(number=st.integers())
    @settings(max_examples=3)
    def test_method(self, worlds, number):
        assert worlds(2).run(lambda context: number) == [number] * 2

@given(number=st.integers(0, 100))
def test_shrinks_to_three_on_new_worlds(world, number):
    if number >= 3:
        world.run(lambda context: 1 / 0 if context.rank else None)

@pytest.mark.worlds(2, deadline=1)
def test_hangs(world):
    world.run(lambda context: time.sleep(1000))

def test_state_of_a_dead_test_is_an_error_of_that_test(world):
    world.run(lambda context: __import__("threading").Timer(0.01, os._exit, (9,)).start())
    until = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in world.pids):
        assert time.monotonic() < until, "not within its time"
        time.sleep(0.01)

def test_last(world):
    assert world.run(lambda context: context.rank) == [0, 1]
"""


def test_examples_and_tests_are_clean_and_failures_are_told(pytester):
    pytester.makepyfile(test_all=ALL)
    before = left_behind(pytester.path)
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", "--tb=short", timeout=120)
    result.assert_outcomes(passed=7, failed=2, errors=1)
    text = result.stdout.str()
    assert "number=3" in text
    assert "rank 1 raised ZeroDivisionError: division by zero (world of 2)" in text
    assert "was not done after 1 s" in text
    assert "ERROR at teardown of test_state_of_a_dead_test" in text
    assert "died: exit status 9" in text
    assert "HealthCheck" not in text
    assert left_behind(pytester.path) == before


def test_wrong_options_and_markers_are_one_clear_line(pytester):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.worlds(0)
        def test_size(world): pass
        """
    )
    for arguments, line in (
        (["--backend=mpi"], "ERROR: --backend=mpi: expected one of auto, gloo, nccl"),
        (
            ["--world-deadline=soon"],
            "ERROR: --world-deadline=soon: expected a number of seconds above 0 and below 86400",
        ),
        (["--world-deadline=86400"], "ERROR: --world-deadline=86400: expected a number of seconds above 0 and below *"),
        (["-o", "world_deadline=-1"], "ERROR: world_deadline=-1: expected a number of seconds above 0 and below *"),
    ):
        result = pytester.runpytest_inprocess(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([line])
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*@pytest.mark.worlds(0): expected numbers of ranks, 1 or more"])
    result.assert_outcomes(errors=1)


def test_a_deadline_of_a_day_is_refused_in_the_marker_too(pytester):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.worlds(2, deadline=86400)
        def test_long(world): pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*@pytest.mark.worlds: deadline=86400: expected a number of seconds above 0 and*"])


LIKE_PYTEST_TIMEOUT = """
pytest_plugins = ["invariants.plugin"]

def pytest_addoption(parser):
    parser.addoption("--timeout", type=float)
    parser.addini("timeout", "seconds")

def pytest_configure(config):
    config.pluginmanager.register(object(), "timeout")
"""


@pytest.mark.parametrize("timeout", [["--timeout=20"], ["-o", "timeout=30"], ["--timeout=31"], []])
def test_h24_a_timeout_that_comes_before_the_deadline_is_told_of(pytester, timeout):
    """https://github.com/Arize-ai/phoenix/pull/15794"""
    pytester.makeconftest(LIKE_PYTEST_TIMEOUT)
    pytester.makepyfile("def test_it(worlds): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *timeout)
    result.assert_outcomes(passed=1, warnings=int(timeout not in ([], ["--timeout=31"])))
    if timeout == ["--timeout=20"]:
        line = "*the timeout of 20 s comes before the deadline of worlds, 30 s, *: lower --world-deadline, or raise*"
        result.stdout.fnmatch_lines([line])


def test_a_failed_rank_is_shown_below_the_line_of_the_test(pytester):
    pytester.makepyfile(
        """
        def fails(context):
            raise ValueError("the third layer")

        def test_it(worlds):
            worlds(1).run(fails)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "rank 0 raised ValueError: the third layer" in text
    assert "world.py" not in text
    assert "_collect" not in text


def test_given_under_a_launcher_of_several_ranks_is_refused(pytester, monkeypatch):
    pytester.makepyfile(
        """
        from hypothesis import given, strategies as st
        @given(st.integers())
        def test_drawn(number): pass
        """
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*@given was entered on one of 2 ranks*"])


def left_behind(folder: Path):
    """Shared memory, and private folders of pools below `folder`."""
    return set(Path("/dev/shm").glob("torch_*")), set(folder.rglob("worlds-*")), set(folder.glob("tmp*"))
