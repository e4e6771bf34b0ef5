"""A world that dies, waits or raises because its ranks do not fit each other says where they part."""

import pickle

import pytest

from invariants.world.failure import RankFailed


def failed(worlds, function, size=2):
    with pytest.raises(RankFailed) as caught:
        worlds(size).run(function, deadline_s=20)
    return caught.value


def test_a_receive_buffer_that_is_too_small_kills_its_rank_and_both_sides_are_told(worlds):
    def run(context):
        import torch
        import torch.distributed as dist

        for rank in (0, 1):
            dist.broadcast(torch.ones(3), rank)
        if context.rank:
            dist.recv(torch.ones(3), 0)
        else:
            dist.send(torch.ones(50), 1)

    failure = failed(worlds, run)
    (told,) = failure.mismatches
    assert failure.failures[0].type_name == "killed by SIGABRT"
    assert told.startswith("1st message from rank 0 to rank 1, shape: rank 0: send of float32[50] to rank 1, ")
    assert "; rank 1: recv of float32[3] from rank 0, " in told
    headline, disagree, *_ = str(failure).splitlines()
    assert headline == "rank 1 died: killed by SIGABRT (world of 2)"
    assert disagree == f"the ranks disagree: {told}"


def test_a_deadlock_of_collectives_that_differ_names_the_difference_before_the_stacks(worlds):
    def run(context):
        import torch
        import torch.distributed as dist

        dist.barrier()
        if context.rank:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), 1)
        dist.barrier()

    failure = failed(worlds, run)
    (told,) = failure.mismatches
    assert told.startswith("2nd collective of ranks 0, 1, kind: rank 0: broadcast of float32[3]")
    assert str(failure).startswith("deadlock: ")
    assert str(failure).index(told) < str(failure).index("most recent call first")


def test_sizes_that_differ_are_named_on_every_pair_of_ranks_once(worlds):
    def run(context):
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(3 + 1000 * (context.rank == 2)))
        dist.barrier()

    (told,) = failed(worlds, run, size=3).mismatches
    assert told.startswith("1st collective of ranks 0, 1, 2, shape: rank 0: all_reduce of float32[3], sum ")
    assert "; rank 2: all_reduce of float32[1003], sum " in told


def test_what_the_other_side_has_not_posted_is_no_mismatch(worlds):
    def run(context):
        import torch
        import torch.distributed as dist

        dist.barrier()
        if context.rank:
            raise ValueError("before its turn")
        dist.isend(torch.ones(3), 1)
        dist.all_reduce(torch.ones(3))

    failure = failed(worlds, run)
    assert failure.mismatches == ()
    assert "disagree" not in str(failure)


def test_mismatches_travel_with_the_failure(worlds):
    def run(context):
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(3, dtype=torch.int32 if context.rank else torch.float32))
        raise ValueError("after it")

    failure = failed(worlds, run)
    (told,) = failure.mismatches
    assert "1st collective of ranks 0, 1, dtype: " in told
    again = pickle.loads(pickle.dumps(failure))
    assert (again.mismatches, str(again)) == (failure.mismatches, str(failure))
