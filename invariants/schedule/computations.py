"""The computations of a schedule, packed: what is run and counted, without what moves data."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy import uint32
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.compiled import available, loop
from invariants.schedule.memory import zeros
from invariants.schedule.table import NEXT, B, Schedule, firsts

_SPARSE: Final = 16
"""Tables have an entry for each stage and microbatch; more than this many an action is a mistake, or hostile."""


class Computations(NamedTuple):
    """The C computations of R ranks and S stages, rank after rank in program order.

    `code` [C] (int32, int64 where that is too small): from the lowest bit, 2 bits for the operation's code, 1 that says
    whether a cell begins here, `bits` for the microbatch, and the stage. A program as one stream of memory is what
    makes a loop over a thousand ranks fast. `offsets` [R+1] (int64): rank r's are those from `offsets[r]` up to
    `offsets[r+1]`. `home` [S] (int32): the rank of each stage, -1 where it computes nothing. `counts` [4, S] (int64):
    how often each operation occurs, by its code. `alone`: whether no cell is compound, and so each begins a cell.
    """

    code: NDArray[Any]
    bits: int
    offsets: NDArray[np.int64]
    home: NDArray[np.int32]
    counts: NDArray[np.int64]
    alone: bool


def check_grid(stages: int, microbatches: int, actions: int) -> None:
    """Refuse tables that a small schedule with one large number, or a slip in an option, would blow up."""
    if max(stages, 1) * max(microbatches, 1) > _SPARSE * max(actions, 2**16):
        size = f"{stages} stages x {microbatches} microbatches"
        raise UsageError(f"schedule: {size}, but {actions} actions: expected most of them to occur")


def computations(schedule: Schedule) -> Computations:
    """A schedule's computations, packed once; a stage on two ranks, and one without stage or microbatch, are a
    `UsageError`. So is a schedule in which nearly all microbatches of nearly all stages are missing.
    """
    return schedule.packed


def pack(schedule: Schedule) -> Computations:
    """Pack a schedule's computations; see `computations`."""
    stages, microbatches = schedule.stages, schedule.microbatches
    check_grid(stages, microbatches, len(schedule))
    bits = max(microbatches - 1, 0).bit_length()
    code = zeros(len(schedule), np.int32 if stages << (bits + 3) < 2**31 else np.int64)
    offsets = np.zeros(schedule.ranks + 1, np.int64)
    home, counts = np.full(stages, -1, np.int32), np.zeros((4, stages), np.int64)
    columns = schedule.starts, schedule.op, schedule.stage, schedule.microbatch, schedule.joint
    wrong = (_pack_compiled if available() else _pack_numpy)(*columns, code, bits, offsets, home, counts)
    if wrong >= 0:
        stage, microbatch = int(schedule.stage[wrong]), int(schedule.microbatch[wrong])
        if min(stage, microbatch) >= 0:
            _ = schedule.placement
        rank, place = schedule.place(wrong)
        where = f"rank {rank}, action {place} computes on stage {stage}, microbatch {microbatch}"
        raise UsageError(f"schedule: {where}: expected 0 or more of both")
    return Computations(code[: offsets[-1]], bits, offsets, home, counts, not schedule.joint.any())


@loop
def _pack_compiled(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    joint: NDArray[np.uint8],
    code: NDArray[Any],
    bits: int,
    offsets: NDArray[np.int64],
    home: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    place = uint32(0)
    for rank in range(len(starts) - 1):
        before = B + 1
        for action in range(starts[rank], starts[rank + 1]):
            i = uint32(action)
            here = op[i]
            if here <= B:
                one, other = uint32(stage[i]), uint32(microbatch[i])
                if stage[i] < 0 or microbatch[i] < 0:
                    return action
                if home[one] != rank:
                    if home[one] >= 0:
                        return action
                    home[one] = rank
                counts[here, one] += 1
                begins = before > B or joint[i] != NEXT
                code[place] = ((one << bits | other) << 1 | begins) << 2 | here
                place = uint32(place + 1)
            before = here
        offsets[rank + 1] = place
    return -1


def _pack_numpy(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    joint: NDArray[np.uint8],
    code: NDArray[Any],
    bits: int,
    offsets: NDArray[np.int64],
    home: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    places = np.flatnonzero(op <= B)
    stage, microbatch, begins = stage[places], microbatch[places], joint[places] != NEXT
    wrong = (stage < 0) | (microbatch < 0)
    offsets[:] = np.searchsorted(places, starts)
    if not wrong.any():
        rank = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(offsets))
        home[:] = firsts(home.shape, (stage,), rank)
        wrong = home[stage] != rank
    if wrong.any():
        return int(places[wrong.argmax()])
    begins[1:] |= np.diff(places) > 1
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    packed = code[: len(places)]
    packed[:] = stage
    packed[:] = ((packed << bits | microbatch) << 1 | begins) << 2 | op[places]
    counts += np.bincount(op[places].astype(np.intp) * len(home) + stage, minlength=counts.size).reshape(4, -1)
    return -1
