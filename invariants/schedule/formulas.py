"""Closed forms for the schedules of `families`.

Convention throughout: N stages, one a rank; M microbatches; F_s and B_s the time of stage s for the forward and the
*full* backward of one microbatch; communication takes no time. Domain: all N >= 1 and M >= 1, M < N included.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from invariants.errors import UsageError

FAMILIES = ("gpipe", "1f1b")


def idle_share(name: str, stages: int, microbatches: int) -> Fraction:
    """Share of the *makespan* for which each rank is idle, at equal costs of all stages: (N-1)/(M+N-1).

    F may differ from B. The same bubble as an overhead over the ideal time M(F+B) is (N-1)/M, which is another number.
    Source: GPipe, arXiv:1811.06965, section 2.3, which gives O((N-1)/(M+N-1)); Megatron-LM, arXiv:2104.04473,
    section 2.2.1, which gives the overhead for GPipe and 1F1B alike.
    """
    _check(name, stages, microbatches)
    return Fraction(stages - 1, microbatches + stages - 1)


def makespan(
    name: str, forward: Sequence[Fraction], backward: Sequence[Fraction], microbatches: int
) -> tuple[Fraction, Fraction]:
    """Least and greatest time that the schedule can take, at costs of each stage that may differ.

    GPipe: both are sum F + (M-1) max F + sum B + (M-1) max B, a permutation flow shop each way: no stage gets its first
    gradient before it has run its last forward. 1F1B: at least max_s [sum_(j<s) (F+B)_j + M (F+B)_s], since stage s
    starts after the first forward of the earlier stages, and they have a backward to run after its last; at most
    GPipe's. Source: derived here, and checked by simulation over N <= 8 and M <= 16.
    """
    _check(name, len(forward), microbatches)
    if len(forward) != len(backward):
        raise UsageError(
            f"schedule {name}: {len(forward)} forward costs, {len(backward)} backward costs: expected as many"
        )
    repeats = microbatches - 1
    high = sum(forward, Fraction()) + repeats * max(forward) + sum(backward, Fraction()) + repeats * max(backward)
    if name == "gpipe":
        return high, high
    low, before = Fraction(), Fraction()
    for cost in map(sum, zip(forward, backward, strict=True)):
        low = max(low, before + microbatches * cost)
        before += cost
    return low, high


def in_flight_bound(name: str, stage: int, stages: int, microbatches: int) -> int:
    """Microbatches whose activations `stage` holds at its peak: M for GPipe, min(M, N-s) for 1F1B.

    Counted from the start of a forward to the end of its backward. Source: Megatron-LM, arXiv:2104.04473, section
    2.2.1.
    """
    _check(name, stages, microbatches)
    if not 0 <= stage < stages:
        raise UsageError(f"schedule {name}: stage={stage}: expected 0 to {stages - 1}")
    return microbatches if name == "gpipe" else min(microbatches, stages - stage)


def _check(name: str, stages: int, microbatches: int) -> None:
    if name not in FAMILIES:
        raise UsageError(f"schedule {name!r}: no closed form; expected one of {', '.join(FAMILIES)}")
    for label, size in (("stages", stages), ("microbatches", microbatches)):
        if size < 1:
            raise UsageError(f"schedule {name}: {label}={size}: expected 1 or more")
