"""ZB-H1 and ZB-H2: 1F1B with its backward split, weight gradients late enough to fill the end of the pipeline."""

from __future__ import annotations

import numpy as np

from invariants.schedule.table import F, I, Schedule, W


def zb_h1(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The memory of 1F1B and less idle time: rank s holds stage s, and at most min(M, N) microbatches.

    N-1-s forwards come before the first pair of F and I, and each W is s microbatches behind its I. Source: section 2.1
    and the upper half of figure 3 of Qi et al., arXiv:2401.10241. torch has it as `ScheduleInterleavedZeroBubble` with
    one stage a rank.
    """
    del virtual
    return _delayed(ranks, microbatches, times=1)


def zb_h2(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Twice the memory of 1F1B, no idle time at equal costs: at most min(M, 2N-1) microbatches on each stage.

    2(N-1-s) forwards come before the first pair of F and I on rank s, which holds stage s, and each W is 2s
    microbatches behind its I. Source: section 2.2 and the lower half of figure 3 of Qi et al., arXiv:2401.10241.
    """
    del virtual
    return _delayed(ranks, microbatches, times=2)


def _delayed(ranks: int, microbatches: int, times: int) -> Schedule:
    """Each rank's F, I and W, each put where so many of the others come before it."""
    op = np.empty((ranks, 3 * microbatches), np.uint8)
    microbatch = np.empty((ranks, 3 * microbatches), np.int32)
    k = np.arange(microbatches, dtype=np.int32)
    for rank in range(ranks):
        ahead, behind = times * (ranks - 1 - rank), times * rank
        ahead = min(ahead, microbatches - 1)
        behind = min(behind, microbatches)
        done = np.minimum(k + behind + 1, microbatches)
        places = {
            F: k + np.maximum(k - ahead, 0) + np.maximum(k - ahead - behind, 0),
            I: k + np.minimum(k + ahead + 1, microbatches) + np.maximum(k - behind, 0),
            W: k + np.minimum(done + ahead, microbatches) + done,
        }
        for code, place in places.items():
            op[rank, place], microbatch[rank, place] = code, k
    stage = np.repeat(np.arange(ranks, dtype=np.int32), 3 * microbatches)
    return Schedule.of_arrays([3 * microbatches] * ranks, op.ravel(), stage, microbatch.ravel())
