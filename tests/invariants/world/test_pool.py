"""A pool's worlds: results, reuse, what travels, and what a test leaves behind."""

import math
import os
import threading
import time
from dataclasses import dataclass
from itertools import pairwise

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Topology
from invariants.errors import UsageError, WorldError
from invariants.world.pool import RankFailed, WorldPool


@dataclass(frozen=True)
class Pair:
    rank: int
    value: object


def identity(context, value=None):
    return context.rank, context.world_size, value


def sum_of_ranks(context):
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(context.rank))
    dist.all_reduce(total)
    return total.item()


@pytest.mark.worlds(1, 2, 3)
def test_results_come_in_rank_order(world):
    def late_first(context):
        time.sleep(0.01 * (context.world_size - context.rank))
        return context.rank

    assert world.run(late_first) == list(range(world.size))
    assert world.run(sum_of_ranks) == [math.comb(world.size, 2)] * world.size


def test_eight_ranks_on_fewer_cores(worlds):
    world = worlds.fresh(8)
    assert world.run(sum_of_ranks) == [28.0] * 8
    world.close()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(value=values)
@settings(max_examples=50)
def test_values_travel_both_ways(world, value):
    assert world.run(identity, value) == [(0, 2, value), (1, 2, value)]


def test_classes_of_a_test_module_come_back_as_themselves(world):
    def pair(context, value):
        return Pair(context.rank, value)

    results = world.run(pair, Pair(7, None))
    assert results == [Pair(0, Pair(7, None)), Pair(1, Pair(7, None))]
    assert {type(result) for result in results} == {Pair}


dtypes = ("float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64")


@given(
    dtype=st.sampled_from(dtypes),
    shape=st.lists(st.integers(0, 4), max_size=3),
    view=st.sampled_from(["whole", "transposed", "stepped", "parameter"]),
)
@settings(max_examples=40)
def test_tensors_arrive_bit_for_bit_without_their_storage(world, dtype, shape, view):
    import torch

    def make(context):
        tensor = (torch.arange(math.prod(shape)) + context.rank).reshape(shape).to(getattr(torch, dtype))
        if view == "transposed" and tensor.dim() > 1:
            return tensor.transpose(0, 1)
        if view == "stepped" and tensor.dim():
            return tensor[::2]
        if view == "parameter" and tensor.is_floating_point():
            return torch.nn.Parameter(tensor)
        return tensor

    class Context:
        rank = 1

    expected = make(Context)
    got = world.run(make)[1]
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got, expected)
    assert not got.requires_grad


def test_a_large_argument_and_result_pass(world):
    data = os.urandom(1 << 24)
    assert world.run(lambda context, bytes_: bytes_[::-1], data) == [data[::-1]] * 2


def test_the_generator_is_seeded_by_the_rank_and_fresh(world):
    import torch

    def draw(context):
        return torch.rand(3, generator=context.generator).tolist()

    first, second = world.run(draw), world.run(draw)
    assert first == second
    assert first[0] != first[1]


def test_state_lives_for_the_test_only(worlds):
    world = worlds(2)

    def remember(context):
        context.state.setdefault("calls", []).append(context.rank)
        return context.state["calls"]

    world.run(remember)
    assert world.run(remember) == [[0, 0], [1, 1]]
    world.reset()
    assert world.run(remember) == [[0], [1]]


def test_processes_are_reused(worlds):
    world, pids = worlds(2), set()
    for _ in range(5):
        pids.add(tuple(world.run(lambda context: os.getpid())))
        world.reset()
    assert pids == {world.pids}
    assert worlds(2) is world


def test_subgroups_are_cached_over_resets(worlds):
    world = worlds(4)

    def sums(context, topology):
        import torch
        import torch.distributed as dist

        result = {}
        for axis, _ in topology.axes:
            total = torch.tensor(float(context.rank))
            dist.all_reduce(total, group=context.axis_group(topology, axis))
            result[axis] = total.item()
        return result, [id(group) for group in context.groups.values()]

    topology = Topology.of(pp=2, dp=2)
    world.run(sums, topology)
    pids = world.pids
    world.reset()
    results = world.run(sums, topology)
    assert [sums for sums, _ in results] == [
        {axis: sum(topology.peers(axis, rank)) for axis in ("pp", "dp")} for rank in range(4)
    ]
    world.reset()
    assert world.run(sums, topology) == results
    assert world.pids == pids


def test_a_topology_that_does_not_fill_the_world_is_a_usage_error(worlds):
    with pytest.raises(RankFailed, match=r"topology pp2.dp2 has 4 ranks, the world has 2") as caught:
        worlds(2).run(lambda context: context.axis_group(Topology.of(pp=2, dp=2), "dp"))
    assert caught.value.failures[0].type_name == "invariants.errors.UsageError"


def opened_by_some(context):
    import torch.distributed as dist

    if context.rank == 0:
        dist.new_group([0])  # torch numbers groups: from here on the ranks disagree


def sent_and_not_received(context):
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        dist.isend(torch.ones(1), 1)


def issued_by_one(context):
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def group_destroyed(context):
    import torch.distributed as dist

    dist.destroy_process_group()


@pytest.mark.parametrize("leave", [opened_by_some, issued_by_one, sent_and_not_received, group_destroyed])
def test_a_world_whose_communication_is_uneven_is_replaced(worlds, leave):
    world = worlds(2)
    world.run(leave)
    before = world.pids
    world.reset()
    assert world.run(sum_of_ranks) == [1.0, 1.0]
    assert before
    assert not set(world.pids) & set(before)


def open_and_use(context):
    import torch
    import torch.distributed as dist

    whole = dist.new_group([0, 1])
    own = [dist.new_group([rank]) for rank in range(2)][context.rank]
    total = torch.tensor(float(context.rank))
    dist.all_reduce(total, group=whole)
    dist.all_reduce(total, group=own)
    return total.item(), len(dist.distributed_c10d._world.pg_map)


def test_groups_that_a_test_opened_are_dropped_and_the_ranks_stay(worlds):
    world = worlds(2)
    world.reset()
    first = world.run(open_and_use)
    pids = world.pids
    for _ in range(3):
        world.reset()
        assert world.run(open_and_use) == first
    assert [total for total, _ in first] == [1.0, 1.0]
    assert world.pids == pids


def test_a_longer_deadline_gets_a_backend_that_waits_as_long(worlds):
    world = worlds.fresh(1)
    world.run(identity)
    pids = world.pids
    world.run(identity, deadline_s=1000.0)
    assert world.pids == pids  # not in the middle of a test: its state would be lost
    world.reset()
    world.run(identity, deadline_s=1000.0)
    assert world.pids != pids
    world.close()


def test_two_pools_that_share_slots_compute_one_after_the_other(tmp_path):
    size = max(2, os.cpu_count() or 1)

    def span(context):
        import torch.distributed as dist

        dist.barrier()
        start = time.monotonic()
        time.sleep(0.15)
        end = time.monotonic()
        dist.barrier()
        return start, end

    spans = []

    def use(name):
        with WorldPool(tmp_path / name, backend="gloo", slots=tmp_path / "slots") as pool:
            for _ in range(3):
                results = pool.get(size).run(span)
                spans.append((min(start for start, _ in results), max(end for _, end in results)))

    threads = [threading.Thread(target=use, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    spans.sort()
    assert len(spans) == 6
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "mpi"}, "expected one of auto, gloo, nccl"),
        ({"deadline_s": 0.0}, "expected a number of seconds"),
        ({"deadline_s": 86400.0}, "below 86400"),
    ],
)
def test_a_wrong_argument_starts_nothing(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        WorldPool(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_world_of_nobody_and_a_module_that_is_not_there_are_usage_errors(tmp_path):
    with WorldPool(tmp_path, backend="gloo", preload=["no_such_module"]) as pool:
        with pytest.raises(UsageError, match="world of 0 ranks"):
            pool.get(0)
        with pytest.raises(UsageError, match="No module named 'no_such_module'"):
            pool.get(2).run(identity)


def test_nccl_without_enough_devices_says_so(tmp_path):
    with WorldPool(tmp_path, backend="nccl") as pool:
        assert "NCCL wants a GPU of its own for each of 64 ranks" in (pool.lacking(64) or "")
        with pytest.raises(UsageError, match="use --backend=gloo"):
            pool.get(64).run(identity)


def test_a_lost_server_is_replaced(tmp_path):
    with WorldPool(tmp_path, backend="gloo") as pool:
        pool.get(1).run(identity)
        pid = pool.get(1).run(lambda context: os.getppid())[0]
        os.kill(pid, 9)
        psutil.wait_procs([psutil.Process(rank) for rank in pool.get(1).pids], timeout=10)
        with pytest.raises(WorldError, match="the process that ranks are forked from has died"):
            pool.get(1).run(identity)
        assert pool.get(1).run(identity) == [(0, 1, None)]


def refused_and_tried_again(context):
    import torch
    import torch.distributed as dist

    parts = [torch.empty(3) for _ in range(context.world_size)]
    if context.rank == 0:
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather(parts, torch.ones(2))
    dist.all_gather(parts, torch.ones(3))
    return [operation.turn for operation in context.recorder.operations()]


def test_what_the_backend_refuses_never_was(worlds):
    world = worlds(2)
    assert world.run(refused_and_tried_again) == [[1], [1]]
    pids = world.pids
    world.reset()
    assert world.pids == pids
