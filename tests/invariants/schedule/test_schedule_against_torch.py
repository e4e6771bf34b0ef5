"""Our generators, lowering and judgement beside what `torch.distributed.pipelining` posts when its own code runs."""

from itertools import product

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from invariants.schedule.completeness import complete
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower
from invariants.schedule.order import evaluate
from invariants.targets.torch_rows import posted_row

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SIZES = list(product(range(1, 6), range(1, 8)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_batched_lowering_is_what_torch_posts(name):
    for stages, microbatches in SIZES:
        if name == "gpipe" or microbatches >= stages:  # torch refuses 1F1B with fewer microbatches than stages
            posted = [posted_row(SCHEDULES[name], s, stages, microbatches, (s > 0, True)) for s in range(stages)]
            assert tuple(posted) == lower(generate(name, stages, microbatches), "batched").rows()


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_rows_hold_with_untrained_first_stages(name):
    for stages, microbatches in SIZES:
        for first in range(stages if microbatches >= stages else 0):
            rows = [
                posted_row(SCHEDULES[name], stage, stages, microbatches, (stage > first, stage >= first))
                for stage in range(stages)
            ]
            assert complete(rows, stages, microbatches, first_trained=first) == []
            assert evaluate(rows, "blocking").finished
