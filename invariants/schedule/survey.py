"""What a schedule computes, counted: which stages each rank holds, and how many computations there are of each kind."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.compiled import available, loop
from invariants.schedule.table import B, Schedule

_SPARSE: Final = 16
"""Tables have an entry for each stage and microbatch; more than this many a computation is a mistake, or hostile."""


class Survey(NamedTuple):
    """What a schedule of R ranks and S stages computes.

    `offsets` [R+1] (int64): rank r's computations are those from `offsets[r]` up to `offsets[r+1]`, counting
    computations alone. `home` [S] (int32): the rank of each stage, -1 where it computes nothing. `counts` [4, S]
    (int64): how often each operation occurs, by its code.
    """

    offsets: NDArray[np.int64]
    home: NDArray[np.int32]
    counts: NDArray[np.int64]


def survey(schedule: Schedule) -> Survey:
    """Count a schedule's computations; a stage on two ranks, and one without stage or microbatch, are a `UsageError`.

    Nor may tables of an entry for each stage and microbatch be much larger than the schedule.
    """
    ranks, stages = schedule.ranks, schedule.stages
    found = Survey(np.zeros(ranks + 1, np.int64), np.full(stages, -1, np.int32), np.zeros((4, stages), np.int64))
    look = _survey_compiled if available() else _survey_numpy
    wrong = look(schedule.starts, schedule.op, schedule.stage, schedule.microbatch, *found)
    if wrong >= 0:
        stage, microbatch = int(schedule.stage[wrong]), int(schedule.microbatch[wrong])
        if min(stage, microbatch) >= 0:
            _ = schedule.placement
        rank, place = schedule.place(wrong)
        where = f"rank {rank}, action {place} computes on stage {stage}, microbatch {microbatch}"
        raise UsageError(f"schedule: {where}: expected 0 or more of both")
    computations = int(found.offsets[-1])
    if stages * schedule.microbatches > _SPARSE * max(computations, 2**16):
        size = f"{stages} stages x {schedule.microbatches} microbatches"
        raise UsageError(f"schedule: {size}, but {computations} computations: expected most of them to occur")
    return found


@loop
def _survey_compiled(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    offsets: NDArray[np.int64],
    home: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    for rank in range(len(starts) - 1):
        computations = 0
        for action in range(starts[rank], starts[rank + 1]):
            if op[action] > B:
                continue
            here = stage[action]
            if here < 0 or microbatch[action] < 0 or home[here] not in (-1, rank):
                return action
            home[here] = rank
            counts[op[action], here] += 1
            computations += 1
        offsets[rank + 1] = offsets[rank] + computations
    return -1


def _survey_numpy(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    offsets: NDArray[np.int64],
    home: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    computing = np.flatnonzero(op <= B)
    stage = stage[computing]
    wrong = (stage < 0) | (microbatch[computing] < 0)
    offsets[:] = np.searchsorted(computing, starts)
    if not wrong.any():
        rank = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(offsets))
        home[stage[::-1]] = rank[::-1]
        wrong = home[stage] != rank
        counts += np.bincount(op[computing].astype(np.intp) * len(home) + stage, minlength=counts.size).reshape(4, -1)
    return int(computing[wrong.argmax()]) if wrong.any() else -1
