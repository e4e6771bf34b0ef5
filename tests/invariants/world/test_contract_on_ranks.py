"""The contract of communication on what real ranks recorded: right programs keep it, whatever they use."""

import pytest

from invariants.contract import disagreements, unpaired

SIZE = 3


def mismatches(records):
    return [str(found) for judge in (disagreements, unpaired) for found in judge(dict(enumerate(records)))]


def collectives(context):
    import torch
    import torch.distributed as dist

    rank, size = context.rank, context.world_size
    one = torch.full((2, 3), float(rank))
    for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        dist.all_reduce(one, op=reduction)
    dist.all_reduce(torch.empty(0))
    dist.all_reduce(torch.tensor(1), async_op=True).wait()
    dist.broadcast(one, 1)
    dist.reduce(one, 2)
    dist.all_gather([torch.empty(2, 3) for _ in range(size)], one)
    dist.all_gather_into_tensor(torch.empty(size * 2, 3), one)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size))
    dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(size)])
    dist.gather(one, [torch.empty(2, 3) for _ in range(size)] if rank == 1 else None, dst=1)
    dist.scatter(torch.empty(4), [torch.ones(4) for _ in range(size)] if rank == 2 else None, src=2)
    sent, received = [rank + other for other in range(size)], [other + rank for other in range(size)]
    dist.all_to_all_single(torch.empty(sum(received), 2), torch.ones(sum(sent), 2), received, sent)
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    dist.barrier()
    dist.monitored_barrier()
    return context.recorder.operations()


def objects_and_functions(context):
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    rank, size, whole = context.rank, context.world_size, dist.group.WORLD
    text = "x" * (10 + 90 * rank)
    dist.all_gather_object([None] * size, text)
    dist.gather_object(text, [None] * size if rank == 0 else None)
    dist.broadcast_object_list([text], src=2)
    dist.scatter_object_list([None], [text] * size if rank == 1 else None, src=1)
    if rank == 0:
        dist.send_object_list([text, rank], dst=1)
    elif rank == 1:
        dist.recv_object_list([None, None], src=0)
    one = torch.ones(size, 2)
    total = functional.all_reduce(one, "sum", whole)
    total = total + functional.all_gather_tensor(one, 0, whole)[:size]
    total = total + functional.reduce_scatter_tensor(one.repeat(size, 1), "sum", 0, whole)
    parts = [[1, 2, 0][(rank + other) % 3] for other in range(size)]
    functional.all_to_all_single(torch.ones(sum(parts)), parts, parts, whole) + 1
    functional.all_reduce_coalesced([one, torch.ones(rank * 0 + 5)], "sum", whole)[0] + 1
    functional.all_gather_into_tensor_coalesced([one, torch.ones(4)], whole)[0] + 1
    return context.recorder.operations()


def groups_and_messages(context):
    import torch
    import torch.distributed as dist

    rank = context.rank
    # First: torch names such a group by the number of groups that a rank has, which differs later on.
    local = dist.new_group([0, 1], use_local_synchronization=True)
    pairs = [dist.new_group([a, b]) for a, b in ((0, 1), (1, 2))]
    alone = dist.new_group([1])
    if rank < 2:
        dist.all_reduce(torch.ones(3), group=pairs[0])
        dist.broadcast(torch.ones(2), group_src=1, group=local)
    if rank == 1:
        dist.all_reduce(torch.ones(5), group=alone)
    if rank > 0:
        dist.barrier(group=pairs[1])
    if rank == 0:
        for _ in range(2):
            dist.recv(torch.empty(2))
        for other in (1, 2):
            dist.send(torch.ones(other), other, tag=other)
    else:
        dist.send(torch.ones(2), 0)
        dist.recv(torch.empty(rank), 0, tag=rank)
    after, before = (rank + 1) % 3, (rank - 1) % 3
    posts = [dist.P2POp(dist.isend, torch.ones(0), after), dist.P2POp(dist.irecv, torch.empty(0), before)]
    for work in dist.batch_isend_irecv(posts):
        work.wait()
    return context.recorder.operations()


def sharded_training(context):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (context.world_size,))
    for wrap in (DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
        torch.manual_seed(0)
        model = wrap(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2)))
        plain = isinstance(model, DistributedDataParallel)
        kind = (lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.Adam)) if plain else torch.optim.Adam
        optimizer = kind(model.parameters())
        for _ in range(2):
            model(torch.ones(4, 5) * context.rank).sum().backward()
            optimizer.step()
    dist.barrier()
    return context.recorder.operations()


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        (collectives, {"gather", "scatter", "reduce_scatter", "all_to_all_single", "monitored_barrier"}),
        (objects_and_functions, {"all_gather", "all_to_all_single", "send", "recv"}),
        (groups_and_messages, {"new_group", "recv_anysource", "send", "recv", "barrier"}),
        (sharded_training, {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"}),
    ],
)
def test_a_right_program_keeps_the_contract(worlds, program, kinds):
    records = worlds(SIZE).run(program, deadline_s=60)
    assert kinds <= {operation.kind for record in records for operation in record}
    assert mismatches(records) == []


def test_what_gloo_lets_pass_is_told(worlds):
    def program(context):
        import torch
        import torch.distributed as dist

        rank, group = context.rank, context.group((0, 2))
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32))
        if rank == 0:
            dist.send(torch.ones(2), 1)
        elif rank == 1:
            dist.recv(torch.empty(5), 0)
        if rank != 1:
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MIN if rank else dist.ReduceOp.SUM, group=group)
        return context.recorder.operations()

    found = mismatches(worlds(SIZE).run(program))
    assert [each.partition(": ")[0] for each in found] == [
        "1st collective of ranks 0, 1, 2, dtype",
        "1st collective of ranks 0, 2, reduction",
        "1st message from rank 0 to rank 1, shape",
    ]
