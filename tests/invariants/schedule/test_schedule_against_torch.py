"""Our generators, lowering and judgement beside what `torch.distributed.pipelining` plans, and posts when it runs."""

from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, schedules

from invariants.errors import UsageError
from invariants.schedule.actions import parse_rows
from invariants.schedule.completeness import complete
from invariants.schedule.families import FAMILIES, generate
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


CLASSES = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def planned(name, ranks, microbatches, virtual):
    """Rows that torch's own class plans for all ranks; its constructor asks the stages of one rank for numbers only."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=virtual * ranks,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == virtual * ranks - 1,
            has_backward=True,
            submod=None,
        )
        for index in range(virtual)
    ]
    order = getattr(schedules, CLASSES[name])(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    return parse_rows([[str(action) for action in order[rank] if action] for rank in range(ranks)])


def refused(name, ranks, microbatches):
    """Whether torch's constructor raises."""
    if name == "dualpipe-v":
        return microbatches < 2 * ranks
    return name in ("interleaved-1f1b", "zb-h1") and microbatches % max(1, microbatches // ranks) != 0


@pytest.mark.parametrize("name", CLASSES)
def test_orders_are_those_that_torch_plans(name):
    for ranks, microbatches in product(range(1, 6), range(1, 17)):
        for virtual in (1, 2, 3) if name == "interleaved-1f1b" else (FAMILIES[name].virtual,):
            if refused(name, ranks, microbatches):
                with pytest.raises(ValueError, match="requires"):
                    planned(name, ranks, microbatches, virtual)
            else:
                theirs = planned(name, ranks, microbatches, virtual)
                assert generate(name, ranks, microbatches, virtual).rows() == theirs


def test_only_dualpipe_v_is_refused_here_too():
    for name, ranks, microbatches in product(CLASSES, range(1, 5), range(1, 9)):
        stages = ranks * (FAMILIES[name].virtual or 2)
        if name == "dualpipe-v" and microbatches < 2 * ranks:
            with pytest.raises(UsageError, match=f"expected {2 * ranks} or more"):
                generate(name, ranks, microbatches, 2)
        else:
            virtual = 1 if name == "zb-h1" else 2
            assert complete(generate(name, ranks, microbatches, virtual), stages, microbatches) == []
