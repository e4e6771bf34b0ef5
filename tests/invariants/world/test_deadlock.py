"""Real ranks that wait for each other are named within a second, whatever the deadline."""

import os
import re
import signal
import time

import pytest

from invariants.world.pool import RankFailed

pytestmark = pytest.mark.worlds(deadline=60)

HERE = r"tests/invariants/world/test_deadlock\.py:\d+"
ATTEMPTS = 4
"""The machine may be busy with something else: once in so many times it must be quick."""


def ready(context):
    import torch.distributed as dist

    dist.barrier()


def failed(world, function, prepare=ready, within_s=1.0):
    """What a call raises, which must be soon."""
    taken = []
    while len(taken) < ATTEMPTS and min(taken, default=within_s) >= within_s:
        world.run(prepare)
        start = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            world.run(function)
        taken.append(time.monotonic() - start)
    assert min(taken) < within_s
    return caught.value


def deadlock_of(world, function, prepare=ready):
    """The sentences of a deadlock by rank, and the line above them."""
    error = failed(world, function, prepare)
    stuck = {failure.rank: failure.headline for failure in error.failures if failure.kind == "deadlock"}
    for failure in error.failures:
        if failure.kind == "deadlock":
            assert failure.text.strip()  # a stack
            assert failure.operations
    first, *sentences = str(error).splitlines()[: 1 + len(stuck)]
    assert [sentence.strip() for sentence in sentences] == [stuck[rank] for rank in sorted(stuck)]
    assert world.run(lambda context: context.rank) == list(range(world.size))
    return first, stuck


def crossing_sends(context):
    import torch
    import torch.distributed as dist

    context.recorder.label = "F, microbatch 2"
    message, other = torch.ones(4, 16), 1 - context.rank
    dist.send(message, other, tag=3)
    dist.recv(message, other, tag=3)


def test_sends_that_cross(worlds):
    line, stuck = deadlock_of(worlds(2), crossing_sends)
    assert line == "deadlock: ranks 0 -> 1 -> 0 wait for each other"
    for rank in (0, 1):
        what = rf"send of float32\[4, 16\] \(F, microbatch 2\) to rank {1 - rank}, tag 3, {HERE}"
        assert re.fullmatch(f"rank {rank} waits in {what}", stuck[rank])


def ring_of_receives(context):
    import torch
    import torch.distributed as dist

    dist.recv(torch.ones(1), (context.rank + 1) % context.world_size)


def test_a_ring_of_receives(worlds):
    line, stuck = deadlock_of(worlds(4), ring_of_receives)
    assert line == "deadlock: ranks 0 -> 1 -> 2 -> 3 -> 0 wait for each other"
    assert set(stuck) == {0, 1, 2, 3}


def first_rank_leaves(context):
    import torch.distributed as dist

    if context.rank:
        dist.barrier()


def test_a_rank_that_finished_early(worlds):
    line, stuck = deadlock_of(worlds(3), first_rank_leaves)
    assert line == "deadlock: nobody is left to do what is waited for"
    for rank in (1, 2):
        what = f"barrier over ranks 0, 1, 2, {HERE}; rank 0 has finished without it"
        assert re.fullmatch(f"rank {rank} waits in {what}", stuck[rank])


def collective_against_message(context):
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
    else:
        dist.recv(torch.ones(3), 0)


def test_a_collective_against_a_message(worlds):
    line, stuck = deadlock_of(worlds(2), collective_against_message)
    assert line == "deadlock: ranks 0 -> 1 -> 0 wait for each other"
    assert re.search(rf"all_reduce of float32\[3\], max over ranks 0, 1, {HERE}; rank 1 has not joined", stuck[0])
    assert re.search(rf"recv of float32\[3\] from rank 0, {HERE}", stuck[1])


def two_collectives(context):
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.barrier()


def test_two_collectives_in_the_same_place(worlds):
    line, stuck = deadlock_of(worlds(2), two_collectives)
    assert line == "deadlock: ranks 0 -> 1 -> 0 wait for each other"
    assert re.match(r"rank 0 waits in all_reduce of float32\[3\], .*; rank 1 has not joined", stuck[0])
    assert re.match(r"rank 1 waits in barrier over ranks 0, 1, .*; rank 0 has not joined", stuck[1])


def two_messages_of_another_order(context):
    import torch
    import torch.distributed as dist

    works = [dist.isend(torch.ones(1), 1 - context.rank, tag=tag) for tag in (0, 1)]
    dist.recv(torch.ones(1), 1 - context.rank, tag=context.rank)
    works[1].wait()
    dist.recv(torch.ones(1), 1 - context.rank, tag=2)


def test_a_wait_that_is_later_than_its_post(worlds):
    _, stuck = deadlock_of(worlds(2), two_messages_of_another_order)
    assert "waits in recv of float32[1] from rank 1, tag 2" in stuck[0]
    assert "waits in send of float32[1] to rank 0, tag 1" in stuck[1]  # rank 0 has received tag 0 alone


def make_ddp(context):
    import torch

    context.state["model"] = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    run_model(context)


def run_model(context):
    import torch

    context.state["model"](torch.ones(2, 3)).sum().backward()


def first_rank_alone_runs_backward(context):
    import torch

    loss = context.state["model"](torch.ones(2, 3)).sum()
    if context.rank == 0:
        loss.backward()


def second_rank_goes_on_to_a_barrier(context):
    import torch.distributed as dist

    first_rank_alone_runs_backward(context)
    if context.rank == 1:
        dist.recv(context.state["model"].module.weight.data, 0)


@pytest.mark.parametrize("function", [first_rank_alone_runs_backward, second_rank_goes_on_to_a_barrier])
def test_a_backward_of_ddp_that_one_rank_skips(worlds, function):
    """DDP waits inside C++, in no handle of an operation."""
    _, stuck = deadlock_of(worlds(2), function, make_ddp)
    assert re.match(rf"rank 0 waits in all_reduce of float32\[12\], sum over ranks 0, 1, {HERE}; rank 1 has", stuck[0])
    assert len(stuck) == (1 if function is first_rank_alone_runs_backward else 2)


def make_fsdp(context):
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    context.state["model"] = fully_shard(model)
    run_sharded(context)


def run_sharded(context):
    import torch

    context.state["model"](torch.ones(2, 4)).sum().backward()


def one_rank_skips_forward(context):
    if context.rank != 1:
        run_sharded(context)


def one_rank_skips_backward(context):
    import torch

    loss = context.state["model"](torch.ones(2, 4)).sum()
    if context.rank != 1:
        loss.backward()


@pytest.mark.parametrize("function", [one_rank_skips_forward, one_rank_skips_backward])
def test_a_pass_of_fsdp_that_one_rank_skips(worlds, function):
    _, stuck = deadlock_of(worlds(3), function, make_fsdp)
    assert set(stuck) == {0, 2}
    for sentence in stuck.values():
        assert re.search(rf"waits in \w+ of float32\[\d+\].* over ranks 0, 1, 2, {HERE}; rank 1 has finished", sentence)


def barrier_in_half(context):
    import torch
    import torch.distributed as dist

    half = context.group((1, 2))
    if context.rank == 1:
        dist.barrier(half)
    elif context.rank == 2:
        dist.recv(torch.ones(1), 1)
    else:
        while True:  # is still at work
            time.sleep(0.01)


def test_a_subgroup_beside_a_rank_that_is_at_work(worlds):
    line, stuck = deadlock_of(worlds(3), barrier_in_half, lambda context: context.group((1, 2)) and None)
    assert line == "deadlock: ranks 1 -> 2 -> 1 wait for each other"
    assert set(stuck) == {1, 2}
    assert re.match(f"rank 1 waits in barrier over ranks 1, 2, {HERE}; rank 2 has not joined", stuck[1])


def groups_in_another_order(context):
    import torch.distributed as dist

    orders = ([0, 1], [1, 2]) if context.rank != 1 else ([1, 2], [0, 1])
    for members in orders:
        dist.new_group(members)


def test_groups_that_are_opened_in_another_order(worlds):
    _, stuck = deadlock_of(worlds(3), groups_in_another_order)
    assert set(stuck) == {0, 1, 2}
    for rank, members in ((0, "0, 1"), (1, "1, 2"), (2, "1, 2")):
        assert re.match(f"rank {rank} waits in new_group over ranks {members}, {HERE}; rank ", stuck[rank])


def group_opened_by_one(context):
    import torch.distributed as dist

    if context.rank == 0:
        dist.new_group([0, 1])


def test_a_group_that_one_rank_alone_opens(worlds):
    _, stuck = deadlock_of(worlds(2), group_opened_by_one)
    assert re.match(f"rank 0 waits in new_group over ranks 0, 1, {HERE}; rank 1 has finished without it", stuck[0])


def make_pipeline(context):
    """Torch's 1F1B over two stages, a step of which is done."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layer = torch.nn.Linear(4, 4)
    stage = PipelineStage(layer, context.rank, context.world_size, torch.device("cpu"))
    context.state["schedule"] = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    step_of_pipeline(context)


def step_of_pipeline(context):
    import torch

    first = context.rank == 0
    arguments, options = ([torch.ones(8, 4)], {}) if first else ([], {"target": torch.ones(8, 4)})
    context.state["schedule"].step(*arguments, **options)


def step_that_sends_first(context):
    """What torch posts together, one by one: sends first, and each waited for."""
    from unittest import mock

    import torch.distributed as dist

    def one_by_one(operations):
        for each in sorted(operations, key=lambda each: each.op is not dist.isend):
            each.op(each.tensor, each.peer, each.group).wait()
        return []

    with mock.patch.object(dist, "batch_isend_irecv", one_by_one):
        step_of_pipeline(context)


def test_a_pipeline_of_torch_that_sends_before_it_receives(worlds):
    line, stuck = deadlock_of(worlds(2), step_that_sends_first, make_pipeline)
    assert line == "deadlock: ranks 0 -> 1 -> 0 wait for each other"
    assert re.match(rf"rank 0 waits in send of float32\[2, 4\] to rank 1, {HERE}", stuck[0])
    assert re.match(rf"rank 1 waits in send of float32\[2, 4\] to rank 0, {HERE}", stuck[1])


def train(context, *faults):
    import contextlib

    import torch

    from impl.target import target
    from invariants.case import Case, Topology
    from invariants.target import GlobalBatch

    case = Case(topology=Topology.of(pp=2), schedule="1f1b", microbatches=4)
    tokens, targets = torch.randint(case.model.vocabulary, (2, case.batch_size, case.model.sequence))
    with contextlib.ExitStack() as planted:
        for fault in faults:
            planted.enter_context(target.faults()[fault].patch())
        trainer = target.build(case, context)
        trainer.step([GlobalBatch(tokens, targets, torch.ones(tokens.shape))], lambda _: None)


def train_sending_first(context):
    """What one posts before it receives, the other waits in."""
    train(context, "send-before-receive", "blocking-sends")


def test_a_planted_order_of_a_pipeline(worlds):
    line, stuck = deadlock_of(worlds(2), train_sending_first, train)
    assert line == "deadlock: ranks 0 -> 1 -> 0 wait for each other"
    for rank in (0, 1):
        assert re.match(rf"rank {rank} waits in send of \S+\[.*\].* to rank {1 - rank}, impl/\w+\.py:\d+", stuck[rank])


def dies_beside_a_deadlock(context):
    import torch
    import torch.distributed as dist

    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.new_group([0, 1])
    dist.recv(torch.ones(1), 1 - context.rank)


def test_a_rank_that_dies_meanwhile_is_told_first(worlds):
    error = failed(worlds(3), dies_beside_a_deadlock, within_s=3.0)  # the others have a second for last words
    assert (error.failures[0].rank, error.failures[0].kind) == (2, "died")
    assert str(error).startswith("rank 2 died: killed by SIGKILL")
    assert all(failure.consequence for failure in error.failures[1:])
