"""Programs as text, one letter an action: text repeats fast, and reads as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.table import ALONE, FIRST, NEXT, B, F, I, Schedule, W

_OPS: Final = {"F": (F, ALONE), "B": (B, ALONE), "I": (I, ALONE), "W": (W, ALONE), "P": (F, FIRST), "Q": (B, NEXT)}
"""Operation, and place in a compound cell, of a letter: `P` is a forward, and `Q` the backward that it overlaps."""


def _columns() -> NDArray[np.uint8]:
    """Operation, chunk and place in a compound cell [3, 128] by the code of a letter; small letters are of chunk 1."""
    columns = np.zeros((3, 128), np.uint8)
    for letter, (op, joint) in _OPS.items():
        columns[:, ord(letter)] = op, 0, joint
        columns[:, ord(letter.lower())] = op, 1, joint
    return columns


_COLUMNS: Final = _columns()


def spelled(programs: Sequence[str], microbatches: int, stages: NDArray[np.int32]) -> Schedule:
    """The schedule in which each rank does what its program says; chunk c of rank r is stage `stages[r, c]`.

    On each rank the k-th forward of a chunk is that of microbatch k, the k-th backward or input gradient too, and the
    k-th weight gradient is that of the chunk's k-th input gradient. All chunks of all ranks run as many forwards and
    backwards; what belongs to microbatches from `microbatches` on is left out.
    """
    letters = np.frombuffer("".join(programs).encode(), np.uint8)
    op, chunk, joint = (column.take(letters) for column in _COLUMNS)
    lengths = np.array([len(program) for program in programs])
    many = programs[0].count("F") + programs[0].count("P")
    order = np.tile(np.arange(many, dtype=np.int32), len(programs))
    microbatch, stage = np.empty(len(op), np.int32), np.repeat(stages[:, 0], lengths)
    for here in range(stages.shape[1]):
        mine = chunk == here
        forward, weights, inputs = (np.flatnonzero(mine & (op == code)) for code in (F, W, I))
        backward = np.flatnonzero(mine & ((op == I) | (op == B)))
        microbatch[forward] = microbatch[backward] = order
        microbatch[weights] = microbatch[inputs]
        if here:
            np.copyto(stage, np.repeat(stages[:, here], lengths), where=mine)
    if many <= microbatches:
        return Schedule.of_arrays(lengths, op, stage, microbatch, joint)
    kept = np.flatnonzero(microbatch < microbatches)
    rank = np.repeat(np.arange(len(programs)), lengths)
    lengths = np.bincount(rank[kept], minlength=len(programs))
    return Schedule.of_arrays(lengths, op[kept], stage[kept], microbatch[kept], joint[kept])
