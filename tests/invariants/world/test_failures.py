"""A rank that raises, dies or never ends: named in one error, soon, and the next call runs on a new world."""

import os
import pickle
import re
import signal
import sys
import time

import pytest

from invariants.errors import WorldError
from invariants.world.pool import RankFailed


def barrier_unless(context, rank, fail):
    import torch.distributed as dist

    if context.rank == rank:
        fail()
    dist.barrier()


def healthy(context):
    import torch.distributed as dist

    dist.barrier()
    return context.rank


def boom():
    raise ValueError("boom at the third layer")


def close_output(context):
    sys.stdout.close()
    return context.rank


def refuse_to_flush(context):
    sys.stdout = type("Full", (), {"closed": False, "flush": lambda self: boom()})()
    raise ValueError("and the output is full")


def test_a_rank_that_closes_its_output_harms_nobody(worlds):
    world, other = worlds.fresh(2), worlds.fresh(1)
    other.run(healthy)
    before = other.pids
    assert world.run(close_output) == [0, 1]
    assert world.run(healthy) == [0, 1]
    world.close()  # its ranks end here
    assert world.run(healthy) == [0, 1]
    with pytest.raises(RankFailed, match="and the output is full"):
        world.run(refuse_to_flush)
    assert world.run(healthy) == [0, 1]
    assert other.run(healthy) == [0]
    assert other.pids == before


@pytest.mark.worlds(2, 4)
def test_a_raise_is_told_first_and_what_followed_behind_it(world, failure_of):
    world.run(healthy)
    start = time.monotonic()
    error = failure_of(world, barrier_unless, world.size - 1, boom)
    assert time.monotonic() - start < 20  # not the deadline of 30
    origin, *others = error.failures
    assert (origin.rank, origin.kind, origin.type_name) == (world.size - 1, "raised", "ValueError")
    assert origin.message == "boom at the third layer"
    assert others
    assert all(other.consequence for other in others)
    text = str(error)
    assert text.startswith(f"rank {world.size - 1} raised ValueError: boom at the third layer (world of {world.size})")
    assert 'raise ValueError("boom at the third layer")' in text  # the line of this file
    assert text.index("boom") < text.index("then: rank ")
    assert "invariants/world/" not in origin.text.replace("tests/invariants/world/", "")


def test_two_different_raises_are_both_told(world, failure_of):
    def fail(context):
        raise (KeyError, OSError)[context.rank](f"of rank {context.rank}")

    error = failure_of(world, fail)
    assert {(failure.rank, failure.type_name) for failure in error.failures} == {(0, "KeyError"), (1, "OSError")}
    assert not any(failure.consequence for failure in error.failures)
    assert "and: rank " in str(error)


DEATHS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_is_named_with_its_signal_and_last_lines(world, name, failure_of):
    def die(context):
        import torch.distributed as dist

        if context.rank == 1:
            print("last words", file=sys.stderr, flush=True)
            DEATHS[name]()
        dist.barrier()

    error = failure_of(world, die)
    origin = error.failures[0]
    assert (origin.rank, origin.kind) == (1, "died")
    assert name in origin.type_name
    assert "last words" in origin.text
    assert all(failure.consequence for failure in error.failures[1:])


def test_sys_exit_is_a_raise_and_not_the_end_of_a_rank(world, failure_of):
    error = failure_of(world, lambda context: sys.exit(4))
    assert {failure.type_name for failure in error.failures} == {"SystemExit"}


def sleep_in_python(context):
    if context.rank == 1:
        time.sleep(10**6)


@pytest.mark.worlds(2, deadline=0.6)
def test_the_marker_sets_the_deadline(world):
    with pytest.raises(RankFailed, match=r"rank 1 (was not done after 0.6 s|raised RuntimeError)"):
        world.run(sleep_in_python)


def leave_or_wait(context):
    import torch.distributed as dist

    if context.rank == 0:
        dist.barrier()


def sleep_or_wait(context):
    import torch.distributed as dist

    if context.rank == 1:
        time.sleep(600)
    dist.barrier()


def test_a_rank_that_waits_for_one_that_has_left_says_who_left(worlds):
    with pytest.raises(RankFailed) as caught:
        worlds(2).run(leave_or_wait, deadline_s=1.5)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "deadlock: nobody is left to do what is waited for"
    assert second.startswith("  rank 0 waits in barrier over ranks 0, 1")
    assert second.endswith("; rank 1 has finished without it")


@pytest.mark.parametrize("made_for_s", [1.5, 30.0])
def test_a_rank_that_sleeps_is_named_before_the_one_that_waited_for_it(worlds, made_for_s):
    world = worlds.fresh(2)
    world.run(healthy, deadline_s=made_for_s)  # the backend of a world gives up before the first deadline that it had
    with pytest.raises(RankFailed) as caught:
        world.run(sleep_or_wait, deadline_s=1.5)
    sleeper, waiter = caught.value.failures
    assert (sleeper.rank, waiter.rank) == (1, 0)
    assert "sleep" in sleeper.text
    assert "after 1.5 s" in sleeper.message or re.fullmatch(
        r"was still at work after \d+(\.\d+)? s of 1\.5", sleeper.message
    )
    assert ("Timed out" in waiter.message) == (made_for_s == 1.5)


def test_those_still_at_work_are_shown_with_their_stack(world, failure_of):
    def fail_beside_work(context):
        if context.rank == 0:
            boom()
        time.sleep(10**6)

    error = failure_of(world, fail_beside_work)
    assert [(failure.rank, failure.kind) for failure in error.failures] == [(0, "raised"), (1, "stopped")]
    assert "in fail_beside_work" in error.failures[1].text


def test_a_result_that_cannot_be_pickled_is_a_clear_error(world, failure_of):
    error = failure_of(world, lambda context: (x for x in ()))
    origin = error.failures[0]
    assert origin.type_name == "TypeError"
    assert origin.message.startswith("result of type generator cannot be pickled: TypeError: cannot pickle 'generator'")


def test_an_argument_that_cannot_be_sent_keeps_the_world(world):
    world.run(healthy)
    pids = world.pids
    with pytest.raises(WorldError, match="healthy and its arguments cannot be sent to ranks: TypeError"):
        world.run(healthy, (x for x in ()))
    assert world.run(healthy) == [0, 1]
    assert world.pids == pids


def test_much_output_does_not_block(world, failure_of):
    def shout(context):
        line = "x" * 1023 + "\n"
        for _ in range(100):
            sys.stderr.write(line * 1024)
        print("heard")

    assert world.run(shout) == [None, None]
    error = failure_of(world, lambda context: shout(context) or os._exit(5))
    assert len(error.failures[0].text) < 10_000


def test_failures_survive_pickling(world, failure_of):
    error = failure_of(world, barrier_unless, 0, boom)
    again = pickle.loads(pickle.dumps(error))
    assert again.failures == error.failures
    assert str(again) == str(error)


def test_what_a_rank_has_started_goes_with_it(world):
    def start(context):
        import subprocess

        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    children = world.run(start)
    with pytest.raises(RankFailed):
        world.run(lambda context: os._exit(1))
    deadline = time.monotonic() + 10
    while any(map(running, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(running, children))


def running(pid):
    """Whether a process exists and is more than a zombie."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
