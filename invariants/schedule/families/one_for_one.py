"""GPipe, 1F1B and interleaved 1F1B: forwards ahead, then a forward and a full backward in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.table import B, F, Schedule

Numbers = NDArray[np.int32]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the microbatches; rank s holds stage s.

    Source: Huang et al., GPipe, arXiv:1811.06965, whose figure 2 draws the backwards in reverse order. Here they run
    first in, first out, as in `torch.distributed.pipelining`: the last stage could start on either, and time and memory
    are the same.
    """
    return _alternate(*_one_chunk(microbatches), [microbatches] * ranks)


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    Rank s holds stage s, and at most min(M, N-s) microbatches, so min(M, N-s) - 1 forwards come before the first pair.
    M < N is allowed: the first stages then run all their forwards first. Source: PipeDream-Flush in Narayanan et al.,
    arXiv:2006.09503, and section 2.2.1 of Megatron-LM, arXiv:2104.04473.
    """
    warmups = [min(microbatches, ranks - rank) - 1 for rank in range(ranks)]
    return _alternate(*_one_chunk(microbatches), warmups)


def interleaved(ranks: int, microbatches: int, virtual: int) -> Schedule:
    """1F1B where rank r holds the v stages r, N + r, .., (v-1) N + r, its chunks.

    The microbatches form max(1, M div N) groups, as equal as can be, larger ones first. A rank runs the forwards of
    chunk 0 for a group, then of chunk 1 for the same group, and so on, then those of the next group; backwards too, the
    last chunk first. (v-1) G + 2 (N-1-r) forwards come before the first pair, G being the size of the first group, or
    all where there are fewer.

    Source: section 2.2 of Megatron-LM, arXiv:2104.04473, and `get_schedule_table` and `get_pp_rank_microbatches` in its
    `megatron/core/pipeline_parallel/schedules.py`, whose order this is where N divides M. Elsewhere Megatron-LM leaves
    the remainder to a last group and refuses it where it is smaller than N, since that idles. The groups here are those
    of torch's `ScheduleInterleaved1F1B` where the number of groups divides M; torch refuses the rest.
    """
    sizes = group_sizes(ranks, microbatches)
    chunk = np.tile(np.arange(virtual, dtype=np.int32), len(sizes)).repeat(np.repeat(sizes, virtual))
    first = np.cumsum(sizes, dtype=np.int32) - sizes
    size, first = (np.repeat(column, sizes * virtual) for column in (sizes, first))
    microbatch = first + (np.arange(virtual * microbatches, dtype=np.int32) - virtual * first) % size
    ahead = (virtual - 1) * int(sizes[0])
    warmups = [min(ahead + 2 * (ranks - 1 - rank), virtual * microbatches) for rank in range(ranks)]
    return _alternate(chunk, microbatch, warmups)


def group_sizes(ranks: int, microbatches: int) -> Numbers:
    """Microbatches of each group of `interleaved`, in order [max(1, M div N)]."""
    groups = max(1, microbatches // ranks)
    sizes = np.full(groups, microbatches // groups, np.int32)
    sizes[: microbatches % groups] += 1
    return sizes


def _one_chunk(microbatches: int) -> tuple[Numbers, Numbers]:
    return np.zeros(microbatches, np.int32), np.arange(microbatches, dtype=np.int32)


def _alternate(chunk: Numbers, microbatch: Numbers, warmups: Sequence[int]) -> Schedule:
    """On each rank its warm-up of forwards, then a forward and a backward in turn, then the backwards that are left.

    `chunk` and `microbatch` [K] of the forwards are the same on all ranks, and of the backwards, but for the order of
    the chunks; chunk c of rank r is stage c N + r.
    """
    ranks, many = len(warmups), len(chunk)
    op = np.empty((ranks, 2 * many), np.uint8)
    stage, number = (np.empty((ranks, 2 * many), np.int32) for _ in range(2))
    up, down = chunk * np.int32(ranks), (chunk.max() - chunk) * np.int32(ranks)
    for rank, warmup in enumerate(warmups):
        pairs = many - warmup
        end = warmup + 2 * pairs
        for code, stages, first, early, late in (
            (F, up + np.int32(rank), warmup, slice(warmup), slice(warmup, end, 2)),
            (B, down + np.int32(rank), pairs, slice(warmup + 1, end, 2), slice(end, None)),
        ):
            op[rank, early] = op[rank, late] = code
            stage[rank, early], stage[rank, late] = stages[:first], stages[first:]
            number[rank, early], number[rank, late] = microbatch[:first], microbatch[first:]
    return Schedule.of_arrays([2 * many] * ranks, op.ravel(), stage.ravel(), number.ravel())
