"""What the tests of worlds share."""

from __future__ import annotations

import pytest

from invariants.world.failure import RankFailed


def healthy(context):
    import torch.distributed as dist

    dist.barrier()
    return context.rank


@pytest.fixture
def failure_of():
    """Run what must fail; the next run must pass on other processes."""

    def failure(world, function, *args, **kwargs):
        world.run(healthy)
        before = world.pids
        with pytest.raises(RankFailed) as caught:
            world.run(function, *args, **kwargs)
        assert world.run(healthy) == list(range(world.size))
        assert not set(before) & set(world.pids)
        return caught.value

    return failure
