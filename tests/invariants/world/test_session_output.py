"""What ranks print, warn of and log is where a user of pytest looks for it; a breakpoint of theirs can be reached."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
import warnings

import pytest

from invariants.world.pool import RankFailed, WorldPool

TALK = """
import logging, os, sys, time, warnings
import pytest
from hypothesis import given, strategies as st

def talk(context, text="this"):
    print("out:", text, "of", context.rank)
    print("err:", text, "of", context.rank, file=sys.stderr)
    print("no newline", end="")
"""

PRINTING = """
def test_passes(worlds):
    worlds(3).run(talk, "that")

def fail(context):
    talk(context)
    assert context.rank != 1

def test_rank_fails(worlds):
    worlds(3).run(fail)

def test_failure_is_expected(worlds):
    with pytest.raises(Exception, match="rank 1 raised AssertionError"):
        worlds(3).run(fail)

def test_fails_on_results(world):
    world.run(talk, "first")
    assert world.run(talk, "second") == 1

@given(st.integers(0, 9))
def test_example(worlds, number):
    worlds(1).run(talk, number)
    assert number < 3

def say_much_and_die(context):
    for number in range(20_000):
        print("line", number)
    print("last words", file=sys.stderr)
    os.abort()

def test_dies(worlds):
    worlds(1).run(say_much_and_die)
"""


@pytest.fixture
def session(pytester, monkeypatch):
    """Run tests in a session of their own; its output, line by line."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytester.makeconftest("pytest_plugins = ['invariants.plugin']")

    def run(tests, *arguments, **outcomes):
        pytester.makepyfile(test_talk=TALK + tests)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=120)
        result.assert_outcomes(**outcomes)
        return result.outlines

    return run


def captured(lines):
    """Of each failed test, the sections of its report: their content by title."""
    found, section = {}, None
    for line in lines:
        if heading := re.fullmatch(r"_+ (\w+)\S* _+", line):
            sections, section = found.setdefault(heading[1], {}), None
        elif heading := re.fullmatch(r"-+ (Captured .+) -+", line):
            section = sections.setdefault(heading[1], [])
        elif line.startswith("===="):
            section = None
        elif section is not None:
            section.append(line)
    return {test: {title: "\n".join(text) for title, text in sections.items()} for test, sections in found.items()}


def test_reports_show_what_failing_ranks_printed_in_that_test(session):
    shown = captured(session(PRINTING, "--tb=short", passed=2, failed=4))
    assert shown["test_rank_fails"] == {
        "Captured stdout of rank 1 (world of 3)": "out: this of 1\nno newline",
        "Captured stderr of rank 1 (world of 3)": "err: this of 1",
    }
    assert shown["test_fails_on_results"] == {  # the ranks did as they were told
        "Captured stdout of rank 0 (world of 2)": "out: first of 0\nno newlineout: second of 0\nno newline",
        "Captured stderr of rank 0 (world of 2)": "err: first of 0\nerr: second of 0",
        "Captured stdout of rank 1 (world of 2)": "out: first of 1\nno newlineout: second of 1\nno newline",
        "Captured stderr of rank 1 (world of 2)": "err: first of 1\nerr: second of 1",
    }
    assert shown["test_example"] == {
        "Captured stdout of rank 0 (world of 1)": "out: 3 of 0\nno newline",
        "Captured stderr of rank 0 (world of 1)": "err: 3 of 0",
    }
    (much,) = shown["test_dies"].values()  # the last words are in the error
    first, *lines = much.splitlines()
    left_out = 20_000 - len(lines)
    assert lines == [f"line {number}" for number in range(left_out, 20_000)]
    assert (
        first == f"(... {sum(len(f'line {number}.') for number in range(left_out)):,} bytes before this are not shown)"
    )


LIVE = """
def talk_and_wait(context, path):
    talk(context)
    while not os.path.exists(path):
        time.sleep(0.01)

def test_live(world, tmp_path):
    world.run(talk_and_wait, "go-on")
    print("after")
    assert world.run(talk) == 1
"""


def test_without_capturing_lines_come_as_they_are_written(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytester.makeconftest("pytest_plugins = ['invariants.plugin']")
    pytester.makepyfile(TALK + LIVE)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-q", "--tb=line", "-p", "no:cacheprovider"],
        cwd=pytester.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = sorted(process.stdout.readline() for _ in range(4))
    assert lines == [f"[rank {rank}] {stream}: this of {rank}\n" for rank in (0, 1) for stream in ("err", "out")]
    (pytester.path / "go-on").touch()
    rest, _ = process.communicate(timeout=60)
    half, after = rest.split("after\n")
    assert sorted(half.splitlines()) == ["[rank 0] no newline", "[rank 1] no newline"]
    assert after.count("out: this of 0") == 1  # and no section that says it again


class Mine(UserWarning):
    pass


def notice(context):
    warnings.warn("careful", Mine, stacklevel=1)
    warnings.warn("careful", Mine, stacklevel=1)
    if context.rank:
        warnings.warn("outdated", DeprecationWarning, stacklevel=1)
    logging.getLogger("my.library").info("loaded %d", 3, extra={"step": 4})
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("my.library").exception("slow")
    if context.state.pop("fail", False):
        os.abort()
    return context.rank


def test_warnings_are_warned_here_once_for_all_ranks(world):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert world.run(notice) == [0, 1]
    told = {str(each.message): each for each in caught}
    assert set(told) == {"careful (ranks 0, 1)", "outdated (rank 1)"}
    assert told["careful (ranks 0, 1)"].category is Mine
    assert told["outdated (rank 1)"].filename == __file__
    line = notice.__code__.co_firstlineno
    assert {each.lineno - line for each in caught} == {1, 2, 4}


def test_filters_of_the_session_hold(world):
    pids = world.run(lambda context: os.getpid())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "care", module=__name__)
        warnings.filterwarnings("error", category=DeprecationWarning)
        with pytest.raises(DeprecationWarning, match=r"outdated \(rank 1\)"):
            world.run(notice)
    assert tuple(pids) == world.pids


def test_a_failure_comes_before_the_warning_that_is_an_error(world):
    world.run(lambda context: context.state.update(fail=context.rank == 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailed, match="rank 1 died: killed by SIGABRT") as caught:
            world.run(notice)
    assert isinstance(caught.value.__context__, Mine)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_records_are_logged_here_under_this_levels(world, caplog):
    world.run(notice)
    assert sorted(caplog.record_tuples) == [("my.library", logging.ERROR, f"[rank {rank}] slow") for rank in (0, 1)]
    assert "KeyError: 'lost'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="my.library"):
        world.run(notice)
    loaded = [record for record in caplog.records if record.levelno == logging.INFO]
    assert sorted((record.rank, record.message, record.step) for record in loaded) == [
        (rank, f"[rank {rank}] loaded 3", 4) for rank in (0, 1)
    ]
    assert loaded[0].pathname == __file__
    caplog.clear()
    world.run(notice)
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_what_was_noted_before_a_death_is_not_lost(world, caplog):
    world.run(lambda context: context.state.update(fail=True))
    with pytest.raises(RankFailed), pytest.warns(Mine), pytest.warns(DeprecationWarning, match="outdated"):
        world.run(notice)
    assert {record.rank for record in caplog.records} == {0, 1}


def stop_there(context):
    number = 40 + context.rank
    breakpoint()
    return number


def test_a_breakpoint_says_how_to_get_there(worlds):
    with pytest.raises(RankFailed, match=r"breakpoint\(\) at .*:\d+ on rank 0: a rank has no terminal") as caught:
        worlds(1).run(stop_there)
    headline = caught.value.failures[0].headline
    assert "run pytest with -s and --world-deadline=3600" in headline


def test_the_told_command_attaches_a_debugger(tmp_path, capfd):
    results = []
    deep = tmp_path / ("long" * 30)  # no socket could have this path
    with WorldPool(deep, backend="gloo", live=True) as pool:
        pool.get(1).run(lambda context: None)
        call = threading.Thread(target=lambda: results.append(pool.get(1).run(stop_there)))
        call.start()
        told, end = "", time.monotonic() + 120
        while "python -m" not in told:
            assert time.monotonic() < end
            time.sleep(0.02)
            told += capfd.readouterr().out
        command = re.search(r"within 27 s: python (-m .+)", told)[1].split()
        attached = subprocess.run(
            [sys.executable, *command], input="p number\nnumber = 7\nc\n", capture_output=True, text=True, timeout=30
        )
        call.join(30)
    assert results == [[7]]
    assert "(Pdb) 40\n" in attached.stdout
    again = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=30)
    assert again.returncode == 1
    assert "no rank waits here: No such file or directory" in again.stderr
