"""Right schedules told in one pass, from one byte for each stage and microbatch; what is wrong is said by `inventory`.

Most schedules that are judged are right, and large ones nearly all. The byte holds what has been done so far; each
action finds there what must have come before it, and nothing that excludes it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy import uint32
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.compiled import available, loop
from invariants.schedule.table import IDLE, RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, Schedule, W

_F, _I, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B = (1 << place for place in range(7))
_ADDS: Final = np.array([_F, _I, _W, _I | _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B], np.uint8)
"""What each action adds, by its code: a full backward is both its halves."""
_NEEDS: Final = {I: _F, W: _I, B: _F, SEND_F: _F, SEND_B: _I}
"""What must be there, on its own stage."""
_EXCLUDES: Final = {W: _W, I: _W, RECV_F: _F, RECV_B: _I}
"""What must not be there, besides what the action adds: it would have come too early."""


def flawless(schedule: Schedule, stages: int, microbatches: int) -> bool:
    """Whether `completeness.missing` and `misordered` would certainly find nothing, whichever stages are trained.

    False decides nothing: with compound cells, or where nothing is compiled, it is always the answer.
    """
    if not available() or schedule.joint.any() or (schedule.stages, schedule.microbatches) != (stages, microbatches):
        return False
    try:
        home = schedule.placement
    except UsageError:  # a stage on two ranks is for `inventory` to name
        return False
    done = np.zeros((stages, microbatches), np.uint8)
    columns = schedule.starts, schedule.op, schedule.stage, schedule.microbatch
    return _in_turn(*columns, home, *_rules(home, schedule.communicates), done) and _whole(done)


def _rules(
    home: NDArray[np.int32], communicates: bool
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int8]]:
    """Of each action by its code and stage [8, S]: the bits that it looks at, how they must be, and how far the stage
    is that computes on the same rank what it needs, 0 where none does.
    """
    near = home[:-1] == home[1:]
    shape = len(_ADDS), len(home)
    looks, needs, steps = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8), np.zeros(shape, np.int8)
    for code, bits in _NEEDS.items():
        needs[code] = bits
    for code, receive, step, here in (
        (F, _RECV_F, -1, slice(1, None)),
        (I, _RECV_B, 1, slice(-1)),
        (B, _RECV_B, 1, slice(-1)),
    ):
        steps[code, here][near] = step
        needs[code, here][~near] |= receive if communicates else 0
    looks[:] = needs | _ADDS[:, None]
    for code, bits in _EXCLUDES.items():
        looks[code] |= bits
    return looks, needs, steps


@loop
def _in_turn(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    home: NDArray[np.int32],
    looks: NDArray[np.uint8],
    needs: NDArray[np.uint8],
    steps: NDArray[np.int8],
    done: NDArray[np.uint8],
) -> bool:
    stages, microbatches = uint32(done.shape[0]), uint32(done.shape[1])
    for rank in range(len(starts) - 1):
        for i in range(uint32(starts[rank]), uint32(starts[rank + 1])):
            code, here, of = op[i], uint32(stage[i]), uint32(microbatch[i])
            if code > RECV_B:
                if code != IDLE and (here >= stages or home[here] != rank):
                    return False
                continue
            if here >= stages or of >= microbatches or home[here] != rank:
                return False
            before = done[here, of]
            if before & looks[code, here] != needs[code, here]:
                return False
            step = steps[code, here]
            if step != 0 and not done[uint32(here + step), of] & (_F if step < 0 else _I):
                return False
            done[here, of] = before | _ADDS[code]
    return True


def _whole(done: NDArray[np.uint8]) -> bool:
    """Whether all is computed, and each send has its receive."""
    if ((done & (_F | _I | _W)) != (_F | _I | _W)).any():
        return False
    here, following = done[:-1], done[1:]
    alone = ((here & _SEND_F) != 0) != ((following & _RECV_F) != 0)
    alone |= ((here & _RECV_B) != 0) != ((following & _SEND_B) != 0)
    beyond = (done[:1] & (_RECV_F | _SEND_B)).any() or (done[-1:] & (_SEND_F | _RECV_B)).any()
    return not alone.any() and not beyond
