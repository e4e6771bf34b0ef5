"""Generators: the order of computation that a family of schedules prescribes, one stage a rank.

Rows hold computation only, with B the *full* backward (input and weight gradients together); `lowering.lower` adds the
sends and receives. With N stages and M microbatches, each costing F + B on every stage and communication free, both
families here need (M + N - 1)(F + B): each rank is idle for (N-1)/(M+N-1) of the makespan, whatever M. They differ in
what they hold in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Op, Row
from invariants.schedule.table import Schedule


def gpipe(stage: int, stages: int, microbatches: int) -> Row:
    """All forwards, then all backwards, both in the order of the microbatches.

    Holds M microbatches at its peak on every stage. Source: Huang et al., GPipe, arXiv:1811.06965, whose figure 2
    draws the backwards in reverse order. Here they run first in, first out, as in `torch.distributed.pipelining`: the
    last stage could start on either, and time and memory are the same.
    """
    del stages
    order = range(microbatches)
    return (*(_forward(stage, i) for i in order), *(_backward(stage, i) for i in order))


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Row:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    Stage s holds at most min(M, N-s) microbatches, so w = min(M, N-s) - 1 forwards come before the first pair. M < N is
    allowed: the first stages then run all their forwards first. Source: PipeDream-Flush in Narayanan et al.,
    arXiv:2006.09503, and section 2.2.1 of Megatron-LM, arXiv:2104.04473.
    """
    warmup = min(microbatches, stages - stage) - 1
    row = [_forward(stage, i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        row += (_forward(stage, warmup + i), _backward(stage, i))
    return (*row, *(_backward(stage, i) for i in range(microbatches - warmup, microbatches)))


FAMILIES: Final[Mapping[str, Callable[[int, int, int], Row]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Each family by its name: (stage, stages, microbatches) to the row of that stage."""


def generate(name: str, stages: int, microbatches: int) -> Schedule:
    """The family `name`, one stage a rank; rank s holds stage s.

    A family that does not exist, or a size below 1, is a `UsageError`.
    """
    if name not in FAMILIES:
        raise UsageError(f"schedule {name!r}: expected one of {', '.join(FAMILIES)}")
    for label, size in (("stages", stages), ("microbatches", microbatches)):
        if size < 1:
            raise UsageError(f"schedule {name}: {label}={size}: expected 1 or more")
    return Schedule.of_rows(FAMILIES[name](stage, stages, microbatches) for stage in range(stages))


def _forward(stage: int, microbatch: int) -> Action:
    return Action(stage, Op.FORWARD, microbatch)


def _backward(stage: int, microbatch: int) -> Action:
    return Action(stage, Op.BACKWARD, microbatch)
