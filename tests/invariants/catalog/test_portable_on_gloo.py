"""What real ranks post on gloo, where it ends, replayed as NCCL would carry it out."""

from itertools import chain

import pytest

from invariants.catalog.replay import replay

TRANSPORTS = {"nccl-lazy": True, "nccl-eager": False}


def exchange(context, how):
    """Both ranks send and receive three tensors; returns what the rank has recorded."""
    import torch
    import torch.distributed as dist

    peer = 1 - context.rank
    for _ in range(3):
        sent, received = torch.full((4,), float(context.rank)), torch.empty(4)
        ends = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        if how == "in a batch":
            works = dist.batch_isend_irecv(ends)
        elif how == "one receives first" and context.rank:
            works = [each.op(each.tensor, peer) for each in reversed(ends)]
        else:
            works = [each.op(each.tensor, peer) for each in ends]
        for work in works:
            work.wait()
        assert received.tolist() == [float(peer)] * 4
    return context.recorder.operations()


def ahead_of_a_reduction(context, _how):
    """Rank 0 sends, then reduces; rank 1 reduces, then receives."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(4)
    if context.rank == 0:
        work = dist.isend(tensor, 1)
        dist.all_reduce(torch.ones(2))
        work.wait()
    else:
        dist.all_reduce(torch.ones(2))
        dist.recv(tensor, 0)
    return context.recorder.operations()


@pytest.mark.parametrize(
    ("function", "how", "stuck"),
    [
        (exchange, "alone", {"nccl-lazy", "nccl-eager"}),
        (exchange, "one receives first", set()),
        (exchange, "in a batch", set()),
        (ahead_of_a_reduction, "", {"nccl-eager"}),
    ],
    ids=["alone", "one receives first", "in a batch", "send before a reduction"],
)
def test_gloo_hides_what_hangs_on_nccl(worlds, function, how, stuck):
    records = list(chain(*worlds(2).run(function, how)))
    outcomes = {transport: replay(records, pairs=pairs) for transport, pairs in TRANSPORTS.items()}
    assert {transport for transport, outcome in outcomes.items() if outcome.stuck} == stuck
    for transport in stuck:
        assert "test_portable_on_gloo.py:" in str(outcomes[transport])
