"""ZB-V and DualPipeV: rank r holds stages r and 2N-1-r, so the pipeline goes to the last rank and back.

A rank's program is spelled in letters: capital ones for its chunk on the way to the last rank, small ones for that on
the way back; `Pq` and `pQ` are a forward of one chunk and the backward of the other that it overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from invariants.schedule.families.letters import spelled
from invariants.schedule.table import Schedule

_ITS_WEIGHTS: Final = str.maketrans("Ii", "Ww")


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """The memory of 1F1B, no idle time where F, I and W take as long.

    For M < 2N-1 it is the order of 2N-1 microbatches without those that do not exist. Source: section 6 of Qi et al.,
    arXiv:2401.10241; arXiv:2405.15362 builds V-Min and V-Half on the same shape. Order, and what becomes of small M, as
    in torch's `ScheduleZBVZeroBubble`.
    """
    many = max(microbatches, 2 * ranks - 1)
    programs = []
    for rank in range(ranks):
        after = ranks - rank
        programs.append(
            "F" * (2 * after - 1)
            + "fF" * rank
            + "fiw" * after
            + "FIWfiw" * (many - ranks - after + 1)
            + "IWfiw" * (after - 1)
            + "Ii" * rank
            + "IW" * after
            + "w" * rank
            + "W" * rank
        )
    return _v_shaped(programs, microbatches)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """A forward of one chunk and a backward of the other overlap in one cell, wherever both are there.

    Needs M >= 2N. Source: DeepSeek's DualPipe, `dualpipe/dualpipev.py`, after arXiv:2412.19437; the order is that of
    torch's `ScheduleDualPipeV`. The last rank does not overlap its first pair, which saves idle time.
    """
    programs = []
    for rank in range(ranks):
        here, after = rank + 1, ranks - rank - 1
        steady = "PqpQ" * (microbatches - 2 * ranks + here)
        if after == 0:
            steady = steady.replace("Pq", "Fb", 1)
        split = ("iI" * here)[here:]
        # Weight gradients leave in the order in which their input gradients came.
        weights = (split + "I" * after).translate(_ITS_WEIGHTS)
        programs.append(
            "F" * (2 * after)
            + "Ff" * here
            + "iwf" * after
            + steady
            + "bpQ" * after
            + ("bB" * here)[:here]
            + split
            + "I".join(weights[:after])
            + "I" * (after > 0)
            + weights[after:]
        )
    return _v_shaped(programs, microbatches)


def _v_shaped(programs: Sequence[str], microbatches: int) -> Schedule:
    there = np.arange(len(programs), dtype=np.int32)
    return spelled(programs, microbatches, np.stack((there, 2 * len(programs) - 1 - there), axis=1))
