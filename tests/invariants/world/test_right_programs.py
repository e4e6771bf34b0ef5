"""Programs that are right, and that a record of communication may take for wrong: not one is, nor its successor."""

from __future__ import annotations

import os
import time

import pytest

from invariants.world.failure import RankFailed

PAUSE_S = 0.6
"""Several looks of the controller."""


def a_group_gives_up_and_its_peer_is_told(context):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if context.rank == 1:
        dist.recv(torch.empty(1), 0)
        return
    with pytest.raises(RuntimeError):
        dist.barrier(group)
    dist.send(torch.ones(1), 1)


def a_thread_starts_the_one_that_sends(context):
    import threading

    import torch
    import torch.distributed as dist

    def send():
        time.sleep(PAUSE_S)
        dist.send(torch.ones(1), 1)

    def start():
        threading.Thread(target=send).start()

    if context.rank == 0:
        threading.Thread(target=start).start()
        dist.recv(torch.empty(1), 1)
    else:
        dist.recv(torch.empty(1), 0)
        dist.send(torch.ones(1), 0)


def what_hangs_on_a_future_sends(context):
    import torch
    import torch.distributed as dist

    def send(_):
        time.sleep(PAUSE_S)
        dist.send(torch.ones(1), 1)

    work = dist.all_reduce(torch.ones(1), async_op=True)
    if context.rank == 0:
        future = work.get_future().then(send)
        dist.recv(torch.empty(1), 1)
        future.wait()
    else:
        work.wait()
        dist.recv(torch.empty(1), 0)
        dist.send(torch.ones(1), 0)


def the_end_of_a_backward_computes_and_sends(context):
    import torch
    import torch.distributed as dist

    weight = torch.ones(2, requires_grad=True)
    handles = []

    def last():
        time.sleep(PAUSE_S)
        dist.send(torch.ones(1), 1)
        handles[0].wait()

    def reduce(gradient):
        handles.append(dist.all_reduce(gradient.clone(), async_op=True))
        if context.rank == 0:
            torch.autograd.Variable._execution_engine.queue_callback(last)

    weight.register_hook(reduce)
    if context.rank == 1:
        dist.recv(torch.empty(1), 0)
    weight.sum().backward()
    handles[0].wait()


def a_leaf_has_its_broadcast_before_the_others_come(context):
    import torch
    import torch.distributed as dist

    if context.rank == 1:
        time.sleep(PAUSE_S)
        dist.broadcast(torch.ones(1), 1)
    elif context.rank == 0:
        dist.broadcast(torch.empty(1), 1)
        dist.send(torch.ones(1), 2)
    else:
        dist.recv(torch.empty(1), 0)
        dist.broadcast(torch.empty(1), 1)


def the_world_is_made_anew_with_other_numbers(context):
    import torch
    import torch.distributed as dist

    folder = os.environ["TMPDIR"]
    dist.destroy_process_group()
    mine = 1 - context.rank
    store = dist.FileStore(f"{folder}/anew.{os.getppid()}", 2)
    dist.init_process_group("gloo", store=store, rank=mine, world_size=2)
    if mine == 0:
        time.sleep(PAUSE_S)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.empty(1), 0)


def a_child_communicates_on_its_own(context):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    child = os.fork()
    if child == 0:
        dist.isend(torch.ones(1), 1 - context.rank)  # noted where the parent does not see it
        os._exit(0)
    os.waitpid(child, 0)
    return len(context.recorder.operations())


def named_arguments(context):
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1)
    dist.group.WORLD.allreduce(tensors=[tensor]).wait()
    with pytest.raises(TypeError):
        dist.group.WORLD.allreduce()
    return tensor.item(), context.recorder.complete


def dtensor_over_a_mesh(_):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    part = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    return (part @ part).full_tensor().sum().item()


def a_group_of_its_members_alone(_):
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1], use_local_synchronization=True))
    return total.item()


@pytest.mark.parametrize(
    ("program", "size"),
    [
        (a_group_gives_up_and_its_peer_is_told, 2),
        (a_thread_starts_the_one_that_sends, 2),
        (what_hangs_on_a_future_sends, 2),
        (the_end_of_a_backward_computes_and_sends, 2),
        (a_leaf_has_its_broadcast_before_the_others_come, 3),
        (the_world_is_made_anew_with_other_numbers, 2),
    ],
)
def test_it_ends(worlds, program, size):
    world = worlds(size)
    world.run(program)
    world.reset()
    assert world.run(lambda context: context.rank) == list(range(size))


def test_a_childs_operations_are_not_its_parents(worlds):
    assert worlds(2).run(a_child_communicates_on_its_own) == [1, 1]


def test_arguments_by_name_reach_torch_and_are_known_to_be_missed(worlds):
    assert worlds(2).run(named_arguments) == [(2.0, False)] * 2


@pytest.mark.parametrize(
    ("program", "size", "result"), [(dtensor_over_a_mesh, 4, 64.0), (a_group_of_its_members_alone, 2, 2.0)]
)
def test_it_runs_in_one_example_after_the_other(worlds, program, size, result):
    world = worlds(size)
    for _ in range(2):
        assert world.run(program) == [result] * size
        world.reset()


def test_a_thread_that_is_left_costs_the_world(worlds):
    def leave(context):
        from concurrent.futures import ThreadPoolExecutor

        context.state["executor"] = executor = ThreadPoolExecutor(1)
        executor.submit(time.time).result()

    world = worlds(2)
    world.run(leave)
    pids = world.pids
    world.reset()
    world.run(lambda context: context.rank)
    assert not set(world.pids) & set(pids)


def test_a_root_that_has_finished_is_waited_for_in_vain(worlds):
    def leaf(context):
        import torch
        import torch.distributed as dist

        if context.rank:
            dist.broadcast(torch.empty(1), 0)

    with pytest.raises(RankFailed, match="rank 0 has finished without it"):
        worlds(2).run(leaf)


@pytest.mark.parametrize(("value", "elements", "flags"), [(165, 1, 0), (7, 40, 0)])
def test_small_messages_may_look_like_the_pattern(worlds, value, elements, flags):
    def exchange(context, value, elements):
        import torch
        import torch.distributed as dist

        context.recorder.watch_buffers()
        tensor = torch.full((elements,), value, dtype=torch.uint8)
        if context.rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        return [operation.flags for operation in context.recorder.operations()]

    assert worlds(2).run(exchange, value, elements) == [[flags], [flags]]
