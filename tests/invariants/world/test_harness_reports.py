"""What went wrong in others' harnesses, provoked here. One test for each public report, which its docstring names.

Those about coverage of ranks and of workers are in `tests/ci/test_ci_coverage.py`.
"""

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from itertools import permutations
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.world.pool import RankFailed, WorldPool


def healthy(context):
    import torch.distributed as dist

    dist.barrier()
    return context.rank


class Unpicklable(Exception):
    def __reduce__(self):
        return 1 / 0


class Unprintable(Exception):
    def __str__(self):
        return 1 / 0


@pytest.mark.parametrize("kind", [Unpicklable, Unprintable])
def test_h02_any_exception_arrives_with_its_traceback(world, kind, failure_of):
    """https://github.com/pytorch/pytorch/pull/52632"""

    def fail(context):
        raise kind("x")

    error = failure_of(world, fail)
    assert error.failures[0].type_name.endswith(kind.__name__)
    assert "raise kind" in error.failures[0].text


def test_h03_a_dead_rank_ends_the_run_long_before_its_deadline(world, failure_of):
    """https://github.com/pytorch/pytorch/pull/34150"""

    def die(context):
        import torch.distributed as dist

        if context.rank == 1:
            os._exit(3)
        dist.barrier()

    start = time.monotonic()
    error = failure_of(world, die, deadline_s=600.0)
    assert time.monotonic() - start < 60
    assert str(error).startswith("rank 1 died: exit status 3 (world of 2)")


def test_h04_a_rank_that_dies_after_its_answer_fails_the_test(worlds):
    """https://github.com/pytorch/pytorch/issues/56390"""
    world = worlds(2)

    def die_later(context):
        if context.rank == 1:
            threading.Timer(0.05, os.abort).start()

    world.run(die_later)
    pid = world.pids[1]
    until(lambda: not running(pid))
    with pytest.raises(RankFailed, match="rank 1 died: killed by SIGABRT"):
        world.reset()
    assert world.run(healthy) == [0, 1]


def stalls(worlds, function):
    """Rank 1 alone stalls in `function`; the run must end at the deadline, and say where."""
    world = worlds(2)
    world.run(healthy)
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        world.run(function, deadline_s=0.7)
    assert 0.7 <= time.monotonic() - start < 10
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind, failure.message) == (1, "deadline", "was not done after 0.7 s")
    assert f"in {function.__name__}" in failure.text
    assert world.run(healthy) == [0, 1]


def sleep_in_python(context):
    if context.rank == 1:
        time.sleep(10**6)


def hold_a_lock_twice(context):
    lock = threading.Lock()
    if context.rank == 1:
        lock.acquire()
        lock.acquire()


def test_h05_a_stalled_rank_of_a_warm_world_ends_at_the_deadline(worlds):
    """https://github.com/pytorch/pytorch/issues/194943"""
    stalls(worlds, sleep_in_python)


def test_h08_killed_ranks_are_reaped(worlds):
    """https://github.com/rwth-i6/returnn/issues/1817"""
    world = worlds.fresh(3)
    world.run(healthy)
    pids = world.pids
    with pytest.raises(RankFailed):
        world.run(lambda context: os.kill(os.getpid(), signal.SIGKILL))
    assert not any(map(psutil.pid_exists, pids))  # not even as zombies
    world.close()


def test_h10_no_port_is_searched_for(tmp_path, monkeypatch):
    """https://github.com/deepspeedai/DeepSpeed/pull/6621"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with WorldPool(tmp_path / "a", backend="gloo") as one, WorldPool(tmp_path / "b", backend="gloo") as other:
            results = []
            threads = [
                threading.Thread(
                    target=lambda pool: results.extend(pool.fresh(2).run(healthy) for _ in range(3)), args=(each,)
                )
                for each in (one, other)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join(60)
            assert results == [[0, 1]] * 6
            ranks = {process.pid for process in psutil.Process().children(recursive=True)}
            opened = [each for each in psutil.net_connections("inet") if each.pid in ranks and not each.raddr]
            assert opened
            assert {each.laddr.ip for each in opened} == {"127.0.0.1"}


def join_a_world_of_one_more(context):
    import torch.distributed as dist

    dist.destroy_process_group()
    store = dist.FileStore(f"{tempfile.mkdtemp()}/store", context.world_size + 1)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size + 1)


def test_h13_a_rendezvous_that_never_comes_ends_at_the_deadline_and_shows_who_waits(worlds, failure_of):
    """https://github.com/pytorch/pytorch/issues/106365"""
    error = failure_of(worlds(2), join_a_world_of_one_more, deadline_s=1.5)
    assert [(failure.rank, failure.kind) for failure in error.failures] == [(0, "deadline"), (1, "deadline")]
    assert all("in join_a_world_of_one_more" in failure.text for failure in error.failures)
    assert all("in init_process_group" in failure.text for failure in error.failures)


def leave_dtype(context):
    import torch

    torch.set_default_dtype(torch.float64)


def leave_seed(context):
    import numpy
    import torch

    torch.manual_seed(99)
    numpy.random.seed(99)
    random.seed(99)


def leave_threads(context):
    import torch

    torch.set_num_threads(3)


def leave_environment(context):
    os.environ.update(RANK="0", WORLD_SIZE="1", LEFT="behind")
    os.chdir("/")


def leave_modes(context):
    import torch

    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_float32_matmul_precision("medium")


def leave_logging(context):
    logging.basicConfig(level=logging.DEBUG, force=True)


def look(context):
    """All that the functions above change."""
    import numpy
    import torch

    return (
        str(torch.get_default_dtype()),
        torch.rand(2, device="cpu").tolist(),
        numpy.random.random(),
        random.random(),
        torch.get_num_threads(),
        dict(os.environ),
        str(Path.cwd()),
        torch.is_grad_enabled(),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(),
        logging.root.level,
        list(map(str, logging.root.handlers)),
    )


LEAVERS = (leave_dtype, leave_seed, leave_threads, leave_environment, leave_modes, leave_logging)


@pytest.mark.parametrize("leave", LEAVERS, ids=lambda leave: leave.__name__)
def test_h15_environment_and_state_are_seen_without_a_reset_and_not_after(worlds, leave):
    """https://github.com/NVIDIA/Model-Optimizer/pull/2296"""
    world = worlds(2)
    world.reset()
    clean = world.run(look)
    world.reset()
    world.run(leave)
    assert world.run(look) != clean
    world.reset()
    assert world.run(look) == clean
    assert world.run(lambda context: os.environ["RANK"]) == ["0", "1"]


@given(order=st.sampled_from(list(permutations(LEAVERS, 3))))
@settings(max_examples=10)
def test_h17_the_order_of_tests_does_not_matter(world, order):
    """https://github.com/NVIDIA/Model-Optimizer/pull/958"""
    seen = []
    for leave in order:
        world.run(leave)
        world.reset()
        seen.append(world.run(look))
        world.reset()
    assert seen == [seen[0]] * len(order)


def open_a_group_on_some(context):
    import torch.distributed as dist

    if context.rank < 2:
        dist.new_group([0, 1])


def test_h19_a_world_whose_groups_differ_is_replaced_and_none_is_destroyed(worlds):
    """https://github.com/deepspeedai/DeepSpeed/issues/7334"""
    world = worlds(3)
    world.run(open_a_group_on_some)
    before = world.pids
    world.reset()
    assert world.run(healthy) == [0, 1, 2]
    assert before
    assert not set(world.pids) & set(before)


def wait_for_nobody(context):
    import torch
    import torch.distributed as dist

    print("about to wait")
    if context.rank == 0:
        dist.recv(torch.ones(1), 1)


def test_h20_a_hang_ends_with_its_line_its_stack_its_output_and_its_last_operation(world, failure_of):
    """https://github.com/sgl-project/sglang/pull/29925"""
    error = failure_of(world, wait_for_nobody, deadline_s=10.0)
    first = error.failures[0]
    assert first.rank == 0
    assert "in wait_for_nobody" in first.text
    assert "recv of float32[1] from rank 1" in first.operations[-1]
    assert [(output.stream, output.text) for output in error.outputs] == [("stdout", "about to wait\n")]


def wait_for_a_child(context):
    command = "import time; print('of the child', flush=True); time.sleep(1000)"
    context.state["child"] = subprocess.run([sys.executable, "-c", command], timeout=1000)


def test_h21_what_the_child_of_a_stuck_rank_printed_is_kept_and_the_child_is_not(worlds, failure_of):
    """https://github.com/hw-native-sys/simpler/pull/721"""
    world = worlds(1)
    world.run(healthy)
    rank = psutil.Process(world.pids[0])
    children = []
    watch = threading.Thread(target=lambda: until(lambda: children.extend(rank.children()) or children))
    watch.start()
    error = failure_of(world, wait_for_a_child, deadline_s=5.0)
    watch.join()
    assert [output.text for output in error.outputs] == ["of the child\n"]
    until(lambda: not any(running(child.pid) for child in children))


def stall_beside_a_helper(context, folder):
    script = f"trap 'touch {folder}/signalled' USR1; touch {folder}/ready; while :; do sleep 0.05; done"
    subprocess.Popen(["sh", "-c", script])
    until(lambda: (folder / "ready").exists())
    time.sleep(1000)


def test_h22_only_ranks_are_asked_for_their_stacks(worlds, tmp_path, failure_of):
    """https://github.com/underworldcode/underworld3/pull/678"""
    error = failure_of(worlds(1), stall_beside_a_helper, tmp_path, deadline_s=5.0)
    assert "in stall_beside_a_helper" in error.failures[0].text
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def test_h23_a_dump_is_followed_by_a_failure_and_the_next_test_runs(worlds):
    """https://github.com/pytest-dev/pytest/issues/13678"""
    stalls(worlds, hold_a_lock_twice)


def wait_for_one_that_waits(context):
    import torch
    import torch.distributed as dist

    if context.rank == 1:
        time.sleep(1000)
    dist.recv(torch.ones(1), 1)


def test_h24_the_limit_of_the_backend_is_inside_the_deadline(worlds):
    """https://github.com/Arize-ai/phoenix/pull/15794"""
    world = worlds.fresh(2)
    with pytest.raises(RankFailed) as caught:
        world.run(wait_for_one_that_waits, deadline_s=3.0)
    sleeper, waiter = caught.value.failures
    assert (sleeper.rank, waiter.rank) == (1, 0)
    assert "in wait_for_one_that_waits" in sleeper.text
    assert "Timed out waiting 2700ms" in waiter.message


late = [0.3]


@given(number=st.integers(1, 4))
@settings(max_examples=5)
def test_h27_a_slow_first_example_is_not_flaky(world, number):
    """https://github.com/HypothesisWorks/hypothesis/issues/2684"""
    slow_s = late.pop() if late else 0.0  # above Hypothesis's own deadline
    assert world.run(lambda context: time.sleep(slow_s) or number) == [number] * 2


def test_h29_a_rank_of_several_does_not_draw(worlds):
    """https://github.com/pytorch/pytorch/issues/25248"""

    def draw(context):
        @given(st.integers())
        def test(number):
            assert isinstance(number, int)

        test()
        return context.rank

    with pytest.raises(RankFailed, match="@given was entered on one of 2 ranks"):
        worlds(2).run(draw)
    assert worlds(1).run(draw) == [0]


def test_h30_many_tensors_cost_no_descriptor(world):
    """https://github.com/pytorch/pytorch/issues/11201"""
    import torch

    def held():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    results = world.run(lambda context: [torch.full((), float(index)) for index in range(2000)])
    assert [each.item() for each in results[0]] == list(map(float, range(2000)))
    assert held() == before


def share_and_die(context, folder):
    from multiprocessing import shared_memory

    import torch

    torch.multiprocessing.set_sharing_strategy("file_system")
    held = torch.ones(1000).share_memory_()
    other = shared_memory.SharedMemory(create=True, size=1000)
    (folder / "names").write_text(f"torch_{os.getpid()}_* {other.name}")
    if held.is_shared():
        os.kill(os.getpid(), signal.SIGKILL)


def test_h31_shared_memory_of_a_killed_rank_goes_with_the_session(tmp_path):
    """https://github.com/pytorch/pytorch/issues/14768"""

    def found():
        return [path for name in (tmp_path / "names").read_text().split() for path in Path("/dev/shm").glob(name)]

    # Torch's manager of shared memory has a socket in it, whose path must be short.
    with tempfile.TemporaryDirectory() as short, WorldPool(Path(short), backend="gloo") as pool:
        with pytest.raises(RankFailed, match="killed by SIGKILL"):
            pool.get(1).run(share_and_die, tmp_path)
        assert found()
    until(lambda: not found())


def send_five_for_three(context):
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        dist.send(torch.ones(5), 1)
    else:
        dist.recv(torch.empty(3), 0)
    dist.barrier()


def test_h34_both_sides_of_a_mismatch_are_told(worlds, failure_of):
    """https://github.com/pytorch/gloo/pull/456"""
    error = failure_of(worlds(2), send_five_for_three)
    assert error.failures[0].rank == 1
    assert "killed by SIGABRT" in error.failures[0].headline
    assert "recv of float32[3] from rank 0" in str(error)
    assert "send of float32[5] to rank 1" in str(error)


FAILS_ONCE = """
import os
import torch.distributed as dist

_original = dist.init_process_group

def _init(*args, **kwargs):
    if kwargs["rank"] == 1 and not os.path.exists(FLAG):
        open(FLAG, "w").close()
        raise RuntimeError("address already in use")
    _original(*args, **kwargs)

dist.init_process_group = _init
"""


def test_h35_after_a_failed_start_all_of_the_world_is_new(tmp_path, monkeypatch):
    """https://github.com/pytorch/pytorch/pull/197324"""
    (tmp_path / "fails_once.py").write_text(f"FLAG = {str(tmp_path / 'failed')!r}\n{FAILS_ONCE}")
    monkeypatch.syspath_prepend(tmp_path)
    with WorldPool(tmp_path / "pool", backend="gloo", preload=["fails_once"]) as pool:
        world = pool.get(2)
        with pytest.raises(RankFailed, match="rank 1 raised RuntimeError: address already in use"):
            world.run(healthy)
        assert world.pids == ()
        assert world.run(healthy) == [0, 1]


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within its time"
        time.sleep(0.01)


def running(pid):
    """Whether a process exists and is more than a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
