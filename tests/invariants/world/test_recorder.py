"""What ranks communicate is recorded: every kind of operation, whoever issues it."""

from dataclasses import dataclass, fields

import pytest

from invariants.communication import CHANGED, NEW_GROUP, UNWRITTEN

WHOLE = (0, 1)


@dataclass(frozen=True)
class Seen:
    """What the tests look at of an operation."""

    kind: str
    shape: tuple = ()
    dtype: str = "float32"
    bytes: int = 0
    tensors: int = 1
    reduction: str = ""
    peer: int = -1
    splits: tuple = ()
    tag: int = 0
    members: tuple = WHOLE


NAMES = [each.name for each in fields(Seen)]


def recorded(context, function, *arguments):
    since = context.recorder.posted
    function(context, *arguments)
    return context.recorder.operations(since)


def seen_of(world, function, *arguments):
    """By rank, what a call is recorded as."""
    answers = world.run(recorded, function, *arguments)
    return [[Seen(*(getattr(each, name) for name in NAMES)) for each in operations] for operations in answers]


def all_reduce(context):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(2, 3), dist.ReduceOp.MAX)
    dist.all_reduce(torch.ones(5, dtype=torch.int64), async_op=True).wait()
    dist.all_reduce(torch.ones(()), dist.ReduceOp.PRODUCT)


def rooted(context):
    import torch
    import torch.distributed as dist

    parts = [torch.ones(3), torch.ones(3)]
    dist.broadcast(torch.ones(2, dtype=torch.bfloat16), 1)
    dist.reduce(torch.ones(4), 1, dist.ReduceOp.MIN)
    dist.gather(torch.ones(3), parts if context.rank == 0 else None, 0)
    dist.scatter(torch.ones(3), parts if context.rank == 1 else None, 1)


def gathered(context):
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    dist.all_gather_into_tensor(torch.ones(6), torch.ones(3))
    dist.reduce_scatter(torch.ones(2), [torch.ones(2), torch.ones(2)], dist.ReduceOp.MAX)
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4))


def exchanged(context):
    import torch
    import torch.distributed as dist

    own, other = ([1, 3], [1, 2]) if context.rank == 0 else ([2, 1], [3, 1])
    dist.all_to_all_single(torch.ones(4, 5), torch.ones(4, 5))
    dist.all_to_all_single(torch.ones(sum(other), 2), torch.ones(sum(own), 2), other, own)
    dist.all_to_all([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)])


def messages(context):
    import torch
    import torch.distributed as dist

    other = 1 - context.rank
    if context.rank == 0:
        dist.send(torch.ones(2, 2), other, tag=7)
        dist.recv(torch.ones(3), tag=8)
    else:
        dist.recv(torch.ones(2, 2), other, tag=7)
        dist.isend(torch.ones(3), other, tag=8).wait()


def barriers(context):
    import torch.distributed as dist

    dist.barrier()
    dist.monitored_barrier()


def coalesced(context):
    import torch
    import torch.distributed as dist

    ones = [torch.ones(2), torch.ones(3, 2)]
    with dist.distributed_c10d._coalescing_manager():
        for each in ones:
            dist.all_reduce(each)
    dist.all_reduce_coalesced(ones, dist.ReduceOp.MAX)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for size in (2, 3):
            dist.all_gather_into_tensor(torch.ones(2 * size), torch.ones(size))
    manager.wait()
    with dist.distributed_c10d._coalescing_manager():
        for size in (2, 3):
            dist.reduce_scatter_tensor(torch.ones(size), torch.ones(2 * size))
    dist.all_gather_coalesced([[torch.ones(2), torch.ones(3)] for _ in WHOLE], [torch.ones(2), torch.ones(3)])


def functional(context):
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    group, sums = dist.group.WORLD, []
    sums.append(functional.all_reduce(torch.ones(3), "sum", group))
    sums.append(functional.all_gather_tensor(torch.ones(3), 0, group))
    sums.append(functional.reduce_scatter_tensor(torch.ones(4), "max", 0, group))
    sums.append(functional.all_to_all_single(torch.ones(4), [2, 2], [2, 2], group))
    sums.append(functional.broadcast(torch.ones(3), 1, group))
    sums.extend(functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "avg", group))
    sums.extend(functional.all_gather_into_tensor_coalesced([torch.ones(2), torch.ones(3)], group))
    sums.extend(functional.reduce_scatter_tensor_coalesced([torch.ones(2)], "sum", [0], group))
    assert all(float(each.sum()) for each in sums)  # waits


def sparse(context):
    import torch
    import torch.distributed as dist

    vector = torch.eye(4).to_sparse()
    dist.all_reduce(vector)
    assert float(vector.to_dense().sum()) == 8


def in_inference_mode(context):
    import torch
    import torch.distributed as dist

    with torch.inference_mode():
        ones = torch.ones(2)
        dist.all_reduce(ones)
        (dist.send if context.rank else dist.recv)(ones, 1 - context.rank)
        assert ones.sum() == 4


F32 = "float32"
NONE = {"dtype": "", "tensors": 0}

ON_BOTH = {
    all_reduce: [
        Seen("all_reduce", (2, 3), F32, 24, reduction="max"),
        Seen("all_reduce", (5,), "int64", 40, reduction="sum"),
        Seen("all_reduce", (), F32, 4, reduction="product"),
    ],
    gathered: [
        Seen("all_gather", (3,), F32, 12, splits=((3, 3),)),
        Seen("all_gather_into_tensor", (3,), F32, 12),
        Seen("reduce_scatter", (2,), F32, 16, 2, "max", splits=((2, 2),)),
        Seen("reduce_scatter_tensor", (4,), F32, 16, reduction="sum"),
    ],
    barriers: [Seen("barrier", **NONE), Seen("monitored_barrier", **NONE)],
    coalesced: [
        Seen("all_reduce_coalesced", (2,), F32, 32, 2, "sum"),
        Seen("all_reduce_coalesced", (2,), F32, 32, 2, "max"),
        Seen("all_gather_into_tensor", (2,), F32, 20, 2),
        Seen("reduce_scatter_tensor", (4,), F32, 40, 2, "sum"),
        Seen("all_gather_coalesced", (2,), F32, 20, 2),
    ],
    functional: [
        Seen("all_reduce", (3,), F32, 12, reduction="sum"),
        Seen("all_gather_into_tensor", (3,), F32, 12),
        Seen("reduce_scatter_tensor", (4,), F32, 16, reduction="max"),
        Seen("all_to_all_single", (4,), F32, 16, splits=((2, 2), (2, 2))),
        Seen("broadcast", (3,), F32, 12, peer=1),
        Seen("all_reduce_coalesced", (2,), F32, 20, 2, "avg"),
        Seen("all_gather_into_tensor", (2,), F32, 20, 2),
        Seen("reduce_scatter_tensor", (2,), F32, 8, reduction="sum"),
    ],
    sparse: [Seen("all_reduce", (4, 4), F32, 64, reduction="sum")],
}


@pytest.mark.parametrize("function", ON_BOTH, ids=lambda function: function.__name__)
def test_collectives(worlds, function):
    assert seen_of(worlds(2), function) == [ON_BOTH[function]] * 2


def test_collectives_with_a_root(worlds):
    first, second = seen_of(worlds(2), rooted)
    assert first == [
        Seen("broadcast", (2,), "bfloat16", 4, peer=1),
        Seen("reduce", (4,), F32, 16, reduction="min", peer=1),
        Seen("gather", (3,), F32, 12, peer=0, splits=((3, 3),)),
        Seen("scatter", (3,), F32, 12, peer=1),
    ]
    assert second[:2] == first[:2]
    assert second[2:] == [
        Seen("gather", (3,), F32, 12, peer=0),
        Seen("scatter", (3,), F32, 12, peer=1, splits=((3, 3),)),
    ]


def test_exchanges_of_uneven_parts(worlds):
    first, second = seen_of(worlds(2), exchanged)
    assert first == [
        Seen("all_to_all_single", (4, 5), F32, 80, splits=((10, 10), (10, 10))),
        Seen("all_to_all_single", (4, 2), F32, 32, splits=((2, 6), (2, 4))),
        Seen("all_to_all", (2,), F32, 16, 2, splits=((2, 2), (2, 2))),
    ]
    assert second[1] == Seen("all_to_all_single", (3, 2), F32, 24, splits=((4, 2), (6, 2)))


def test_messages(worlds):
    assert seen_of(worlds(2), messages) == [
        [Seen("send", (2, 2), F32, 16, peer=1, tag=7), Seen("recv_anysource", (3,), F32, 12, peer=-1, tag=8)],
        [Seen("recv", (2, 2), F32, 16, peer=0, tag=7), Seen("send", (3,), F32, 12, peer=0, tag=8)],
    ]


def test_inference_mode(worlds):
    first, second = seen_of(worlds(2), in_inference_mode)
    assert first == [Seen("all_reduce", (2,), F32, 8, reduction="sum"), Seen("recv", (2,), F32, 8, peer=1)]
    assert second[1] == Seen("send", (2,), F32, 8, peer=0)


def batches(context):
    import torch
    import torch.distributed as dist

    other = 1 - context.rank
    for _ in range(2):
        posts = [dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, torch.ones(2), other)]
        for work in dist.batch_isend_irecv(posts):
            work.wait()
    sent = dist.isend(torch.ones(1), other)
    dist.recv(torch.ones(1), other)
    sent.wait()


def test_what_is_posted_together_is_told_apart_from_the_rest(worlds):
    for operations in worlds(2).run(recorded, batches):
        assert [each.kind for each in operations] == ["send", "recv"] * 3
        first, second, alone = ([each.batch for each in operations[at : at + 2]] for at in (0, 2, 4))
        assert first[0] == first[1] != second[0] == second[1]
        assert 0 not in (*first, *second)
        assert alone == [0, 0]


def batches_that_keep_nothing(context):
    import gc
    import weakref

    import torch
    import torch.distributed as dist

    def exchange():
        held = torch.ones(4, requires_grad=True)
        posts = [dist.P2POp(dist.isend, torch.ones(2), 1 - context.rank)]
        posts.append(dist.P2POp(dist.irecv, torch.ones(2), 1 - context.rank))
        for work in dist.batch_isend_irecv(posts):
            work.wait()
        return weakref.ref(held)

    held = exchange()
    gc.collect()
    return held() is None


def test_what_a_caller_held_is_let_go(worlds):
    assert worlds(2).run(batches_that_keep_nothing) == [True, True]


def objects(context):
    import torch.distributed as dist

    everything = [None, None]
    dist.all_gather_object(everything, context.rank)
    assert everything == [0, 1]
    dist.broadcast_object_list(["x", 1], src=0)
    dist.gather_object("x", everything if context.rank == 0 else None, 0)
    dist.scatter_object_list([None], [1, 2] if context.rank == 0 else None, 0)
    (dist.send_object_list if context.rank else dist.recv_object_list)(["x"], 1 - context.rank)


def test_collectives_of_objects(worlds):
    first, second = seen_of(worlds(2), objects)
    kinds = ["all_gather"] * 2 + ["broadcast"] * 2 + ["all_gather", "gather"] + ["broadcast", "scatter", "scatter"]
    assert sorted(each.kind for each in first[:-2]) == sorted(kinds)
    assert [each.kind for each in second[:-2]] == [each.kind for each in first[:-2]]
    assert [each.kind for each in first[-2:]] == ["recv", "recv"]
    assert [each.kind for each in second[-2:]] == ["send", "send"]
    assert {each.dtype for each in first} == {"int64", "uint8"}


def subgroups(context):
    import torch
    import torch.distributed as dist

    late, alone = dist.new_group([2, 1]), dist.new_group([2], use_local_synchronization=True)
    if context.rank:
        dist.all_reduce(torch.ones(1), group=late)
        dist.broadcast(torch.ones(1), 2, group=late)
        (dist.send if context.rank == 1 else dist.recv)(torch.ones(1), 3 - context.rank, group=late)
    if context.rank == 2:
        dist.barrier(alone)


def test_subgroups_are_told_in_ranks_of_the_world(worlds):
    outside, first, second = worlds(3).run(recorded, subgroups)
    assert [(each.kind, each.members, each.turn) for each in outside] == [(NEW_GROUP, (1, 2), 1)]
    assert [(each.kind, each.members, each.peer, each.turn) for each in first] == [
        (NEW_GROUP, (1, 2), -1, 1),
        ("all_reduce", (1, 2), -1, 1),
        ("broadcast", (1, 2), 2, 2),
        ("send", (1, 2), 2, 1),
    ]
    assert [(each.kind, each.members, each.peer, each.turn) for each in second] == [
        (NEW_GROUP, (1, 2), -1, 1),
        (NEW_GROUP, (2,), -1, 1),
        ("all_reduce", (1, 2), -1, 1),
        ("broadcast", (1, 2), 2, 2),
        ("recv", (1, 2), 1, 1),
        ("barrier", (2,), -1, 1),
    ]
    assert first[1].group == second[2].group != second[5].group
    assert first[1].sequence == second[2].sequence
    assert second[1].sequence != second[0].sequence == first[0].sequence == outside[0].sequence


def labelled(context):
    import torch
    import torch.distributed as dist

    recorder = context.recorder
    recorder.label = "F, microbatch 2"
    dist.all_reduce(torch.ones(1))
    recorder.label = ""
    left = dist.all_reduce(torch.ones(1), async_op=True), dist.all_reduce(torch.ones(1), async_op=True)
    left[1].wait()
    dist.barrier()
    left[0].wait()


def test_what_is_told_of_each_operation(worlds):
    for rank, operations in enumerate(worlds(2).run(recorded, labelled)):
        assert [each.label for each in operations] == ["F, microbatch 2", "", "", ""]
        assert [each.turn for each in operations] == [1, 2, 3, 4]
        assert [each.number for each in operations] == [0, 1, 2, 3]
        assert {each.rank for each in operations} == {rank}
        lines = [each.source.rpartition(":")[2] for each in operations]
        start = labelled.__code__.co_firstlineno
        assert lines == [str(start + 6), str(start + 8), str(start + 8), str(start + 10)]
        assert all(each.source.startswith("tests/invariants/world/test_recorder.py:") for each in operations)
        assert all(0 < each.posted <= each.completed for each in operations)
        assert operations[1].completed > operations[2].completed  # as they were waited for
        text = str(operations[0])
        assert text.startswith("all_reduce of float32[1] (F, microbatch 2), sum over ranks 0, 1, tests/")


def never_waited_for(context):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1), async_op=True)
    dist.barrier()


def test_what_nobody_waited_for_has_no_end(worlds):
    for operations in worlds(2).run(recorded, never_waited_for):
        assert operations[0].completed == 0 < operations[1].completed


def in_a_thread(context):
    import threading

    import torch
    import torch.distributed as dist

    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(9),))
    thread.start()
    thread.join()


def test_what_another_thread_communicates_is_recorded_too(worlds):
    assert seen_of(worlds(2), in_a_thread) == [[Seen("all_reduce", (9,), F32, 36, reduction="sum")]] * 2


def test_a_reset_forgets(worlds):
    world = worlds(2)
    world.run(recorded, labelled)
    world.reset()
    assert [len(operations) for operations in world.run(recorded, barriers)] == [2, 2]
    assert [[each.number for each in operations] for operations in world.run(lambda c: c.recorder.operations())] == [
        [0, 1]
    ] * 2


# Whoever uses torch's own wrappers


def model(torch, layers=1, width=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))


def ddp_step(context, hook):
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = torch.nn.parallel.DistributedDataParallel(model(torch))
    if hook:
        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
    wrapped(torch.ones(2, 3)).sum().backward()
    with wrapped.no_sync():
        wrapped(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize(("hook", "dtype"), [("", F32), ("fp16_compress_hook", "float16"), ("allreduce_hook", F32)])
def test_ddp(worlds, hook, dtype):
    """Its reducer calls from C++."""
    size = {F32: 4, "float16": 2}[dtype]
    for operations in seen_of(worlds(2), ddp_step, hook):
        reduced = [each for each in operations if each.kind == "all_reduce"]
        assert reduced == [Seen("all_reduce", (9,), dtype, 9 * size, reduction="sum")]
        assert Seen("broadcast", (9,), F32, 36, peer=0) in operations


def fsdp_step(context):
    import torch
    from torch.distributed.fsdp import fully_shard

    whole = model(torch, layers=2, width=4)
    for layer in whole:
        fully_shard(layer)
    fully_shard(whole)
    whole(torch.ones(2, 4)).sum().backward()


def test_fsdp(worlds):
    for operations in seen_of(worlds(2), fsdp_step):
        steps = [each for each in operations if each.kind in ("all_gather_into_tensor", "reduce_scatter_tensor")]
        assert [each.kind for each in steps].count("all_gather_into_tensor") in (3, 4)  # the last may be kept
        assert [each for each in steps if each.kind == "reduce_scatter_tensor"] == [
            Seen("reduce_scatter_tensor", (16,), F32, 64, reduction=steps[-1].reduction)
        ] * 2
        assert {each.bytes for each in steps if each.kind == "all_gather_into_tensor"} == {32}


def zero_step(context):
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = model(torch, layers=2)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    since = context.recorder.posted
    wrapped(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return context.recorder.operations(since)


def test_zero_redundancy_optimizer(worlds):
    for operations in worlds(2).run(zero_step):
        assert sorted((each.kind, each.peer, each.shape) for each in operations) == [
            ("broadcast", 0, (3, 3)),
            ("broadcast", 1, (3, 3)),
        ]


def pipeline_step(context):
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model(torch), context.rank, context.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    since = context.recorder.posted
    if context.rank == 0:
        schedule.step(torch.ones(8, 3))
    else:
        schedule.step(target=torch.ones(8, 3))
    return context.recorder.operations(since)


def test_pipelining(worlds):
    first, second = ([each for each in row if each.dtype == F32] for row in worlds(2).run(pipeline_step))
    for operations, peer in ((first, 1), (second, 0)):
        assert [each.kind for each in operations].count("send") == 4
        assert [each.kind for each in operations].count("recv") == 4
        assert {(each.shape, each.bytes, each.peer) for each in operations} == {((2, 3), 24, peer)}
        # Torch batches what goes both ways, and nothing else.
        batches = {}
        for each in operations:
            batches.setdefault(each.batch, []).append(each.kind)
        assert sorted(batches.pop(0)) == ["recv", "send"]
        assert [sorted(batch) for batch in batches.values()] == [["recv", "send"]] * 3
    # Each send is the receive of the other side at the same turn.
    for mine, others in ((first, second), (second, first)):
        sends = {each.turn for each in mine if each.kind == "send"}
        assert sends == {each.turn for each in others if each.kind == "recv"}


# Buffers


def changed_and_not(context):
    import torch
    import torch.distributed as dist

    context.recorder.watch_buffers()
    if context.rank == 0:
        for changes in (True, False):
            message = torch.ones(8)
            work = dist.isend(message, 1, tag=changes)
            if changes:
                message[3] = 2
            dist.barrier()
            work.wait()
    else:
        for tag in (1, 0):
            dist.barrier()
            dist.recv(torch.ones(8), 0, tag=tag)


def test_a_buffer_that_changes_while_it_is_sent_is_noted(worlds):
    first, second = worlds(2).run(recorded, changed_and_not)
    assert [each.flags for each in first if each.kind == "send"] == [CHANGED, 0]
    assert {each.flags for each in second} == {0}


def of_another_length(context):
    import torch
    import torch.distributed as dist

    context.recorder.watch_buffers()
    if context.rank == 0:
        dist.send(torch.ones(8), 1)
    else:
        dist.recv(torch.ones(12), 0)


def test_a_receive_that_is_longer_than_what_was_sent_is_noted(worlds):
    first, second = worlds(2).run(recorded, of_another_length)
    assert [each.flags for each in first] == [0]
    assert [each.flags for each in second] == [UNWRITTEN]


def read_too_early(context):
    import torch
    import torch.distributed as dist

    context.recorder.watch_buffers()
    message = torch.ones(3)
    if context.rank == 0:
        work = dist.irecv(message, 1)
        early = bool(message.isnan().all())
        dist.barrier()
        work.wait()
        return early, message.tolist()
    dist.barrier()
    dist.send(message, 0)
    return None


def test_a_receive_buffer_that_is_read_too_early_holds_no_numbers(worlds):
    assert worlds(2).run(read_too_early)[0] == (True, [1.0, 1.0, 1.0])


def of_all_dtypes(context):
    import torch
    import torch.distributed as dist

    context.recorder.watch_buffers()
    other = 1 - context.rank
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64"
    for dtype in map(torch.__dict__.get, names.split()):
        for shape in ((), (1,), (3, 5), (0,)):
            sent, received = torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)
            posts = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            for work in dist.batch_isend_irecv(posts):
                work.wait()
            assert torch.equal(sent, received), (dtype, shape)
    dist.all_reduce(torch.ones(3))


def test_right_messages_of_all_dtypes_are_not_flagged(worlds):
    for operations in worlds(2).run(recorded, of_all_dtypes):
        assert {each.flags for each in operations} == {0}
        assert len(operations) == 1 + 2 * 11 * 4


def test_watching_ends_with_a_reset(worlds):
    world = worlds(2)
    world.run(recorded, changed_and_not)
    world.reset()
    assert world.run(lambda context: context.recorder.buffers) == [None, None]
