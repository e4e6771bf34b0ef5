"""Blocking sends without a network: each rank stands at one send or receive at a time, where its peer comes or not."""

from __future__ import annotations

import numpy as np
from numpy import uint32
from numpy.typing import NDArray

from invariants.schedule.compiled import available, loop
from invariants.schedule.table import RECV_B, SEND_F, Schedule


def all_meet(schedule: Schedule) -> bool:
    """Whether with blocking sends every send and receive meets the one of its own name, and so the schedule ends.

    False decides nothing: where messages go in batches, swap or never meet, or nothing is compiled, `order` evaluates
    the network of waits, which can be explained. A stage that computes on two ranks is a `UsageError`.
    """
    if not available() or (schedule.joint.any() and schedule.joint[schedule.exchanges].any()):
        return False
    return _meet(schedule.starts, schedule.op, schedule.stage, schedule.microbatch, schedule.placement)


@loop
def _meet(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    placement: NDArray[np.int32],
) -> bool:
    ranks, stages, size = len(starts) - 1, uint32(len(placement)), len(starts) - 1
    at, ends = starts[:-1].astype(np.uint32), starts[1:].astype(np.uint32)
    for rank in range(uint32(ranks)):
        here = at[rank]
        while here < ends[rank] and (op[here] < SEND_F or op[here] > RECV_B):
            here = uint32(here + 1)
        at[rank] = here
    # Where two can meet, one of them is going, or ready to: who was met by another may meet a third one now.
    ready, going = np.arange(ranks - 1, -1, -1).astype(np.uint32), np.ones(ranks, np.bool_)
    while size:
        size -= 1
        rank = ready[uint32(size)]
        going[rank] = False
        here, stop = at[rank], ends[rank]
        while here < stop:
            mine, up = uint32(stage[here]), op[here] == SEND_F or op[here] == RECV_B
            there = uint32(mine + 1) if up else uint32(mine - 1)
            if mine >= stages or there >= stages or placement[there] < 0 or placement[mine] != rank:
                return False
            peer = uint32(placement[there])
            other, end = at[peer], ends[peer]
            if other == end or uint32(stage[other]) != there or microbatch[other] != microbatch[here]:
                break
            if op[other] != op[here] ^ 1:  # codes of a send and its receive differ in the last bit
                break
            other, here = uint32(other + 1), uint32(here + 1)
            while other < end and (op[other] < SEND_F or op[other] > RECV_B):
                other = uint32(other + 1)
            while here < stop and (op[here] < SEND_F or op[here] > RECV_B):
                here = uint32(here + 1)
            at[peer] = other
            if not going[peer]:
                going[peer] = True
                ready[uint32(size)] = peer
                size += 1
        at[rank] = here
    return bool((at == ends).all())
