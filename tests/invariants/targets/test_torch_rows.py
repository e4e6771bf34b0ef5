"""Rows recorded from torch's schedule code, without a process group."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from invariants.schedule.actions import Action, Batch, Op, Row
from invariants.targets.torch_rows import posted_row

BOTH = (True, True)
MIRROR = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}


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
def test_each_message_is_sent_and_received_in_one_order(schedule, stages, more, frozen):
    microbatches, frozen = stages + more, frozen % stages
    rows = [flat(row) for row in pipeline(schedule, stages, microbatches, frozen)]
    for stage, row in enumerate(rows):
        for op in (Op.FORWARD, Op.BACKWARD):
            assert [a.microbatch for a in row if a.op is op] == list(range(microbatches))
        for send, (receive, step) in MIRROR.items():
            sent = [a.microbatch for a in row if a.op is send]
            peer = stage + step
            received = [a.microbatch for a in rows[peer] if a.op is receive] if 0 <= peer < stages else []
            wanted = 0 <= peer < stages and (send is Op.SEND_F or stage > frozen)
            assert sent == received == (list(range(microbatches)) if wanted else [])


@given(st.integers(1, 6), st.integers(0, 7))
def test_1f1b_holds_no_more_microbatches_than_stages_to_come(stages, more):
    for stage, row in enumerate(pipeline(Schedule1F1B, stages, stages + more, 0)):
        held = peak = 0
        for action in flat(row):
            held += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(action.op, 0)
            peak = max(peak, held)
        assert (held, peak) == (0, min(stages + more, stages - stage))


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
