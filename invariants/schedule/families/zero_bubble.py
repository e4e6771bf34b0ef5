"""ZB-H1 and ZB-H2: 1F1B with its backward split, weight gradients late enough to fill the end of the pipeline."""

from __future__ import annotations

import numpy as np

from invariants.schedule.families.letters import spelled
from invariants.schedule.table import Schedule


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """The memory of 1F1B and less idle time: rank s holds stage s, and at most min(M, N) microbatches.

    N-1-s forwards come before the first pair of F and I, and each W is s microbatches behind its I. Source: section 2.1
    and the upper half of figure 3 of Qi et al., arXiv:2401.10241. torch has it as `ScheduleInterleavedZeroBubble` with
    one stage a rank.
    """
    return _delayed(ranks, microbatches, times=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice the memory of 1F1B, no idle time at equal costs: at most min(M, 2N-1) microbatches on each stage.

    2(N-1-s) forwards come before the first pair of F and I on rank s, which holds stage s, and each W is 2s
    microbatches behind its I. Source: section 2.2 and the lower half of figure 3 of Qi et al., arXiv:2401.10241.
    """
    return _delayed(ranks, microbatches, times=2)


def _delayed(ranks: int, microbatches: int, times: int) -> Schedule:
    """`times` (N-1-r) forwards ahead on rank r, and weight gradients `times` r microbatches behind."""
    programs = []
    for rank in range(ranks):
        ahead = min(times * (ranks - 1 - rank), microbatches)
        behind = min(times * rank, microbatches)
        paired = microbatches - ahead
        waiting = min(behind, paired)
        late = behind - waiting
        programs.append(
            "F" * ahead
            + "FI" * waiting
            + "FIW" * (paired - waiting)
            + "I" * late
            + "IW" * (ahead - late)
            + "W" * behind
        )
    return spelled(programs, microbatches, np.arange(ranks, dtype=np.int32)[:, None])
