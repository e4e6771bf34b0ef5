"""Ranks that wait for one which is slow are left alone, whatever they wait in and however busy the machine is."""

import os
import random
import subprocess
import sys
import time
from datetime import timedelta

import pytest

pytestmark = pytest.mark.worlds(deadline=60)

SLOW_S = 2.0
"""Many times as long as it takes to prove a deadlock."""


@pytest.fixture
def busy_cores():
    """A process on each core that does nothing but compute."""
    compute = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", compute]) for _ in range(os.cpu_count() or 1)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def sleep():
    time.sleep(SLOW_S)


def compute():
    import torch

    end = time.monotonic() + SLOW_S
    while time.monotonic() < end:
        torch.ones(50, 50) @ torch.ones(50, 50)


def slow_send(context, idle):
    import torch
    import torch.distributed as dist

    message = torch.full((3,), context.rank + 1.0)
    if context.rank == 0:
        idle()
        dist.send(message, 1)
    elif context.rank == 1:
        dist.recv(message, 0)
        dist.send(message, 2)
    else:
        dist.recv(message, 1)
    return message.sum().item() == 3


def slow_all_reduce(context, idle):
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        idle()
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return ones.sum().item() == 9


def slow_barrier(context, idle):
    import torch.distributed as dist

    if context.rank == 2:
        idle()
    dist.barrier()
    return True


def slow_backward(context, idle):
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3, bias=False))
    loss = model(torch.full((2, 3), float(context.rank))).sum()
    if context.rank == 1:
        idle()
    loss.backward()
    return model.module.weight.grad.sum().item() == 18


def slow_group(context, idle):
    import torch.distributed as dist

    if context.rank == 1:
        idle()
    dist.barrier(dist.new_group([0, 1]))
    return True


@pytest.mark.parametrize("idle", [sleep, compute])
def test_a_rank_that_is_slow_on_a_busy_machine(worlds, busy_cores, idle):
    world = worlds(3)
    for function in (slow_send, slow_all_reduce, slow_barrier, slow_backward):
        assert world.run(function, idle) == [True] * 3
    assert worlds(2).run(slow_group, idle) == [True] * 2


def second_thread(context, first_message):
    """Rank 0's main thread waits for what rank 1 sends once it has heard of rank 0's second thread."""
    import threading

    import torch
    import torch.distributed as dist

    message, heard = torch.ones(2), torch.zeros(2)

    def talk():
        if first_message:
            dist.send(message, 1, tag=1)
        time.sleep(SLOW_S / 2)
        dist.send(message, 1, tag=2)

    if context.rank == 0:
        threading.Thread(target=talk).start()
        dist.recv(heard, 1, tag=3)
    else:
        if first_message:
            dist.recv(heard, 0, tag=1)
        dist.recv(heard, 0, tag=2)
        dist.send(message, 0, tag=3)
    return heard.sum().item()


@pytest.mark.parametrize("first_message", [False, True])
def test_a_second_thread_that_communicates_later(worlds, first_message):
    assert worlds(2).run(second_thread, first_message) == [2.0, 2.0]


def thread_that_outlives_the_call(context):
    import threading

    import torch
    import torch.distributed as dist

    message = torch.ones(2)
    if context.rank == 0:
        threading.Timer(SLOW_S / 2, dist.send, (message, 1)).start()
    else:
        dist.recv(message.zero_(), 0)
    return message.sum().item()


def test_a_thread_that_communicates_when_its_rank_is_done(worlds):
    assert worlds(2).run(thread_that_outlives_the_call) == [2.0, 2.0]


def many_threads(context):
    """More than the record has room for, one after the other and at once; the last one is what rank 1 waits for."""
    import threading

    import torch
    import torch.distributed as dist

    message = torch.ones(2)
    if context.rank == 0:
        for tag in range(20):
            thread = threading.Thread(target=dist.send, args=(message, 1, None, tag))
            thread.start()
            thread.join()
        for tag in range(20, 40):
            threading.Timer(0.05 * (tag - 20), dist.send, (message, 1, None, tag)).start()
        dist.recv(message, 1, tag=40)
    else:
        for tag in range(40):
            dist.recv(message, 0, tag=tag)
        dist.send(message, 0, tag=40)
    return message.sum().item()


def test_more_threads_than_a_record_knows(worlds):
    assert worlds(2).run(many_threads) == [2.0, 2.0]


def gives_up_by_itself(context):
    import torch
    import torch.distributed as dist

    if context.rank == 1:
        try:
            dist.irecv(torch.ones(1), 0).wait(timedelta(seconds=SLOW_S / 2))
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_wait_with_a_limit_of_its_own(worlds):
    world = worlds.fresh(2)
    start = time.monotonic()
    _, told = world.run(gives_up_by_itself)
    assert time.monotonic() - start >= SLOW_S / 2
    assert "Timed out waiting" in told
    world.close()


def polls(context):
    import torch
    import torch.distributed as dist

    ones, message = torch.ones(2), torch.zeros(2)
    if context.rank == 0:
        work = dist.all_reduce(ones, async_op=True)
        until = time.monotonic() + SLOW_S / 2
        while not work.is_completed():
            time.sleep(0.001)
            if until and time.monotonic() > until:
                dist.send(torch.ones(2), 1)  # who waits would never do this
                until = None
        work.wait()
        work.wait()
    else:
        dist.recv(message, 0)
        dist.all_reduce(ones)
    return ones.sum().item()


def test_asking_whether_it_is_done_is_no_wait(worlds):
    assert worlds(2).run(polls) == [4.0, 4.0]


def posted_and_waited_for_later(context):
    import torch
    import torch.distributed as dist

    messages = torch.zeros(2), torch.ones(2)
    received, sum_ = dist.irecv(messages[0], 1 - context.rank), dist.all_reduce(messages[1], async_op=True)
    sum_.wait()
    time.sleep(SLOW_S / 2)  # two posted receives are no deadlock
    sent = dist.isend(messages[1], 1 - context.rank)
    received.wait()
    time.sleep(SLOW_S / 4)
    sent.wait()  # is done
    sum_.wait()
    return messages[0].sum().item()


def test_operations_that_are_posted_before_and_waited_for_after(worlds):
    assert worlds(2).run(posted_and_waited_for_later) == [4.0, 4.0]


def from_any_source(context):
    import torch
    import torch.distributed as dist

    message = torch.zeros(1)
    if context.rank == 0:
        sources = [dist.recv(message), dist.recv(message, 2), dist.recv(message)]
        dist.send(message, 1)
        return sources
    if context.rank == 2:
        time.sleep(SLOW_S / 2)
        dist.send(message, 0)
    dist.send(message, 0)
    if context.rank == 1:
        dist.recv(message, 0)
    return None


def test_receives_from_any_source(worlds):
    sources = worlds(3).run(from_any_source)[0]
    assert sorted(sources) == [1, 2, 2]
    assert sources[1] == 2


def programs(seed, size):
    """Two hundred programs that end, by rank: what belongs together is in the same order everywhere."""
    choose = random.Random(seed)
    rows = [[] for _ in range(size)]
    for _ in range(200):
        for _ in range(choose.randint(1, 5)):
            kind = choose.choice(["message", "message", "ring", "all_reduce", "barrier", "pair", "sleep"])
            ranks = choose.sample(range(size), 2)
            if kind == "message":
                rows[ranks[0]].append(("send", ranks[1]))
                rows[ranks[1]].append(("recv", ranks[0]))
            elif kind == "sleep":
                rows[ranks[0]].append((kind, choose.choice([0.001, 0.01] * 20 + [0.4])))
            else:
                members = sorted(ranks) if kind == "pair" else range(size)
                for rank in members:
                    rows[rank].append((kind, tuple(members)))
    return rows


def carry_out(context, rows):
    import torch
    import torch.distributed as dist

    ones, rank, size = torch.ones(2), context.rank, context.world_size
    for pair in ((a, b) for a in range(size) for b in range(a + 1, size)):
        context.group(pair)
    for kind, detail in rows[rank]:
        if kind == "send":
            dist.send(ones, detail)
        elif kind == "recv":
            dist.recv(ones, detail)
        elif kind == "ring":
            sent = dist.isend(ones, (rank + 1) % size, tag=1)
            dist.recv(ones.clone(), (rank - 1) % size, tag=1)
            sent.wait()
        elif kind == "all_reduce":
            dist.all_reduce(torch.ones(3))
        elif kind == "barrier":
            dist.barrier()
        elif kind == "pair":
            dist.barrier(context.group(detail))
        else:
            time.sleep(detail)
    return len(rows[rank])


@pytest.mark.parametrize("seed", [1])
def test_two_hundred_right_programs_that_sleep_here_and_there(worlds, seed):
    rows = programs(seed, 3)
    assert worlds(3).run(carry_out, rows) == [len(row) for row in rows]
