"""Live schedule objects of torch, made without a process group: their constructors ask a stage for numbers only."""

from types import SimpleNamespace

import pytest

STAGES_A_RANK = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def fake_stage(index, stages, ranks):
    """As much of a `PipelineStage` of rank 0 as a schedule's constructor reads."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=ranks,
        group_rank=0,
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=True,
        submod=None,
    )


@pytest.fixture(scope="session")
def torch_schedule():
    """(class name, ranks, microbatches, options of the class) to an object of that class, as rank 0 makes it."""
    from torch.distributed.pipelining import schedules

    def make(name, ranks, microbatches, **options):
        local = STAGES_A_RANK[name]
        stages = [fake_stage(index, local * ranks, ranks) for index in range(local)]
        made = getattr(schedules, name)
        return made(stages[0] if local == 1 else stages, microbatches, loss_fn=lambda *_: None, **options)

    return make
