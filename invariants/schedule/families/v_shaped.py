"""ZB-V and DualPipeV: rank r holds stages r and 2N-1-r, so the pipeline goes to the last rank and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.table import ALONE, FIRST, NEXT, B, F, I, Schedule, W

Part = tuple[int, int, int]
"""Operation, chunk (0 on the way to the last rank, 1 on the way back) and place in a compound cell."""
F0, F1, B0, B1, I0, I1, W0, W1 = ((op, chunk, ALONE) for op in (F, B, I, W) for chunk in (0, 1))
F0_B1 = ((F, 0, FIRST), (B, 1, NEXT))
F1_B0 = ((F, 1, FIRST), (B, 0, NEXT))


def zb_v(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """The memory of 1F1B, no idle time where F, I and W take as long.

    For M < 2N-1 it is the order of 2N-1 microbatches without those that do not exist. Source: section 6 and figure 6 of
    Qi et al., arXiv:2401.10241 (there from its second version on), and arXiv:2405.15362, whose V-Min and V-Half build
    on it; order and small M as in torch's `ScheduleZBVZeroBubble`.
    """
    del virtual
    many = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        after = ranks - rank
        row = _numbered(
            ((F0,), 2 * after - 1),
            ((F1, F0), rank),
            ((F1, I1, W1), after),
            ((F0, I0, W0, F1, I1, W1), many - ranks - after + 1),
            ((I0, W0, F1, I1, W1), after - 1),
            ((I0, I1), rank),
            ((I0, W0), after),
            ((W1,), rank),
            ((W0,), rank),
        )
        rows.append(row[:, row[2] < microbatches])
    return _v_shaped(rows)


def dualpipe_v(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """A forward of one chunk and a backward of the other overlap in one cell, wherever both are there.

    Needs M >= 2N. Source: DeepSeek's DualPipe, `dualpipe/dualpipev.py`, after arXiv:2412.19437; the order is that of
    torch's `ScheduleDualPipeV`. The last rank does not overlap its first pair, which saves idle time.
    """
    del virtual
    rows = []
    for rank in range(ranks):
        here, after = rank + 1, ranks - rank - 1
        steady = microbatches - 2 * ranks + here
        last = after == 0
        halves = (B1, B0) * here
        split = [(I, chunk, ALONE) for _, chunk, _ in halves[here:]]
        late = iter([chunk for _, chunk, _ in split] + [0] * after)
        rows.append(
            _numbered(
                ((F0,), 2 * after),
                ((F0, F1), here),
                ((I1, W1, F1), after),
                ((F0, B1, *F1_B0), int(last)),
                ((*F0_B1, *F1_B0), steady - last),
                ((B1, *F1_B0), after),
                ((*halves[:here], *split), 1),
                ([part for _ in range(after) for part in ((W, next(late), ALONE), I0)], 1),
                ([(W, chunk, ALONE) for chunk in late], 1),
            )
        )
    return _v_shaped(rows)


def _numbered(*blocks: tuple[Sequence[Part], int]) -> NDArray[np.int32]:
    """Operation, chunk, microbatch and place in a compound cell [4, K] of parts that are repeated so many times.

    The k-th forward of a chunk is that of microbatch k, the k-th backward too, and the k-th weight gradient is that of
    the chunk's k-th input gradient.
    """
    tiles = [np.tile(np.array(parts, np.int32).reshape(-1, 3), (times, 1)) for parts, times in blocks]
    op, chunk, joint = np.concatenate(tiles).T
    microbatch = np.empty_like(op)
    for here in (chunk == 0, chunk == 1):
        for which in (here & (op == F), here & ((op == I) | (op == B))):
            microbatch[which] = np.arange(np.count_nonzero(which))
        microbatch[here & (op == W)] = microbatch[here & (op == I)]
    return np.stack((op, chunk, microbatch, joint))


def _v_shaped(rows: Sequence[NDArray[np.int32]]) -> Schedule:
    op, chunk, microbatch, joint = np.concatenate(rows, axis=1)
    lengths = [row.shape[1] for row in rows]
    rank = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    stage = np.where(chunk == 0, rank, 2 * len(rows) - 1 - rank)
    return Schedule.of_arrays(lengths, op, stage, microbatch, joint)
