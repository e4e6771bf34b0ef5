"""Rows recorded from torch's schedule code, without a process group."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from invariants.schedule.actions import Action, Batch, Op, Row
from invariants.schedule.completeness import complete
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower
from invariants.schedule.order import evaluate
from invariants.targets.torch_rows import posted_row

BOTH = (True, True)


def flat(row: Row) -> list[Action]:
    return [action for cell in row for action in (cell.actions if isinstance(cell, Batch) else (cell,))]


def pipeline(schedule, stages: int, microbatches: int, first_trained: int) -> list[Row]:
    """Rows of all stages, where stages before `first_trained` are frozen."""
    return [
        posted_row(schedule, stage, stages, microbatches, (stage > first_trained, stage >= first_trained))
        for stage in range(stages)
    ]


@given(st.sampled_from([ScheduleGPipe, Schedule1F1B]), st.integers(1, 6), st.integers(0, 7), st.integers(0, 5))
@example(Schedule1F1B, 1, 0, 0)
@example(ScheduleGPipe, 3, 0, 2)
def test_rows_are_complete_and_end_under_every_transport(schedule, stages, more, frozen):
    microbatches, frozen = stages + more, frozen % stages
    rows = pipeline(schedule, stages, microbatches, frozen)
    assert complete(rows, stages, microbatches, frozen) == []
    for transport in ("buffered", "blocking"):
        outcome = evaluate(rows, transport)
        assert (outcome.finished, outcome.mismatches) == (True, ())
    gradients_sent = {action.stage for row in rows for action in flat(row) if action.op is Op.SEND_B}
    assert gradients_sent == set(range(frozen + 1, stages))


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(0, 7))
def test_rows_are_those_of_the_batched_lowering(family, stages, more):
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[family]
    rows = pipeline(schedule, stages, stages + more, 0)
    assert tuple(rows) == lower(generate(family, stages, stages + more), "batched").rows()


def test_mixed_posts_are_batched_and_others_are_not():
    first, last = pipeline(Schedule1F1B, 2, 2, 0)
    assert " ".join(map(str, first)) == "0F0 0SEND_F0 0F1 (0SEND_F1;0RECV_B0)BATCH 0B0 0RECV_B1 0B1"
    assert " ".join(map(str, last)) == "1RECV_F0 1F0 1B0 (1SEND_B0;1RECV_F1)BATCH 1F1 1B1 1SEND_B1"


def test_a_frozen_first_stage_waits_for_no_gradient():
    assert " ".join(map(str, posted_row(ScheduleGPipe, 0, 2, 1, (False, False)))) == "0F0 0SEND_F0 0B0"


def test_fewer_microbatches_than_stages_are_refused_in_torchs_words():
    with pytest.raises(ValueError, match="must be greater than"):
        posted_row(Schedule1F1B, 0, 3, 2, BOTH)


def test_torch_is_left_as_it_was():
    before = dist.isend, dist.irecv, dist.batch_isend_irecv
    posted_row(Schedule1F1B, 1, 3, 4, BOTH)
    assert (dist.isend, dist.irecv, dist.batch_isend_irecv) == before
