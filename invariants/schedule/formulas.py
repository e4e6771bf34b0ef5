"""Closed forms for the schedules of `families`: how long they take, how long ranks idle, what they hold.

Notation: N ranks; M microbatches; v stages a rank; F, I and W the time of one stage for the forward, the input gradient
and the weight gradient of one microbatch, equal on all stages; B = I + W the *full* backward; O the time of a cell in
which a forward and a full backward overlap (F + B unless `Costs.overlapped` says otherwise). Communication takes no
time. m = min(M, N). Papers that cut a rank's work into v chunks often write F for the rank; here it is one stage's.

There are two conventions for idle time, and none of the functions mixes them:

- `makespan_idle` and `idle_share`: what a rank does not compute of the *makespan*, from the first start on any rank to
  the last end on any. GPipe's and Megatron-LM's papers count so.
- `own_idle`: the longest *own span* of a rank, from its first start to its last end, less its work. The zero-bubble
  papers count so, since a rank that is done early can start on the next iteration.

Each docstring tells its domain, in which the tests find it equal to simulation, and its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from invariants.errors import UsageError
from invariants.schedule.costs import Costs
from invariants.schedule.families import checked
from invariants.schedule.families.one_for_one import group_sizes

UNITS: Final = Costs()


@dataclass(frozen=True)
class _Times:
    """Times of one stage; see the module."""

    forward: Fraction
    input_gradient: Fraction
    weight_gradient: Fraction
    overlapped: Fraction

    @property
    def all(self) -> Fraction:
        """Time of one microbatch on one stage."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class _Idle:
    """Idle time in both conventions, and the cells of rank 0 in which computations overlap."""

    makespan: Fraction
    own: Fraction
    overlaps: int = 0


def outside(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs = UNITS) -> str | None:
    """Why there is no closed form for the time of this schedule at these costs; None where there is one.

    gpipe, 1f1b, interleaved-1f1b, zb-h1 and zb-h2 have one for all N, M, v >= 1 and all costs; zb-v for all N and M
    where W <= F <= I; dualpipe-v, which needs M >= 2N, where W <= I and O >= max(F, B). All stages cost the same, and
    communication nothing. A family that does not exist at these sizes is a `UsageError`.
    """
    checked(name, ranks, microbatches, virtual)
    times = _times(costs)
    if times is None:
        return f"{name}: costs that differ between stages have no closed form"
    if costs.latency != 0 or costs.bandwidth is not None:
        return f"{name}: communication that takes time has no closed form"
    if name == "zb-v" and not times.weight_gradient <= times.forward <= times.input_gradient:
        return f"{name}: a closed form needs W <= F <= I"
    if name == "dualpipe-v":
        longer = max(times.forward, times.all - times.forward)
        if times.weight_gradient > times.input_gradient or times.overlapped < longer:
            return f"{name}: a closed form needs W <= I, and F and B overlapped in no less than the longer of them"
    return None


def makespan(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs = UNITS) -> Fraction:
    """Time from the first start to the last end, in the costs' unit; its domain is that of `outside`."""
    idle, times = _idle(name, ranks, microbatches, virtual, costs)
    stages = checked(name, ranks, microbatches, virtual).virtual or virtual
    return idle.makespan + stages * microbatches * times.all + idle.overlaps * (times.overlapped - times.all)


def makespan_idle(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs = UNITS) -> Fraction:
    """Time of the makespan for which rank 0 does not compute; its domain is that of `outside`.

    It is the same on every rank, unless O differs from F + B: not all ranks overlap as many cells.

    - gpipe, 1f1b: (N-1)(F+B). The overhead over the ideal time M(F+B) is (N-1)/M: GPipe, arXiv:1811.06965, section 2.3,
      gives O((N-1)/(M+N-1)); Megatron-LM, arXiv:2104.04473, section 2.2.1, the overhead, for both.
    - interleaved-1f1b: (v max(M,N) + m - 1 - vM)(F+B), which is (N-1)(F+B) for M >= N: Megatron-LM, section 2.2.2.
    - zb-h1: (N-1)(F+I) - (m-1) min(F, I, W). Derived here.
    - zb-h2: (N-1)(F+I) - (k div 2) min(I, 2F, 2W) - (k mod 2) min(F, I, W) with k = min(M, 2N-1) - 1. Derived here.
    - zb-v: the longer of its own idle time and, for M >= N, (N-1) I + max(0, 2N-1-M)(I-W). Derived here.
    - dualpipe-v: its own idle time, as rank 0 starts first and ends last.
    """
    return _idle(name, ranks, microbatches, virtual, costs)[0].makespan


def idle_share(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs = UNITS) -> Fraction:
    """Share of the *makespan* for which rank 0 does not compute: `makespan_idle` over `makespan`, 0 where both are 0.

    GPipe and 1F1B: (N-1)/(M+N-1), whatever F and B are; interleaved 1F1B: 1 - vM / (v max(M,N) + m - 1), which is
    (N-1)/(vM+N-1) for M >= N. The same bubble as an overhead over the ideal time is (N-1)/(vM), another number.
    """
    time = makespan(name, ranks, microbatches, virtual, costs)
    return makespan_idle(name, ranks, microbatches, virtual, costs) / time if time else Fraction()


def own_idle(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs = UNITS) -> Fraction:
    """Longest *own span* of a rank less its work, in the costs' unit; its domain is that of `outside`.

    - gpipe, 1f1b, interleaved-1f1b: as `makespan_idle`, since rank 0 starts first and ends last.
    - zb-h1: (N-1)(F+I) - (m-1) min(F, W). For M >= N and W <= F this is (N-1)(F+I-W), table 2 of arXiv:2401.10241; for
      W > F no schedule that holds N microbatches reaches that, since rank 0 waits (N-1) I for its first gradient.
    - zb-h2: (N-1)(F+I) - (k div 2) min(F+I, 2F, 2W) - (k mod 2) min(F, W) with k = min(M, 2N-1) - 1. For M >= 2N-1,
      and W <= F or I <= F, this is (N-1) max(0, F+I-2W), table 2 of arXiv:2401.10241, which leaves out the floor.
    - zb-v: 2 [(N-1)(F+I) - (m-1) F - (min(M, 2N-1) - m) W], which is 2(N-1)(I-W) for M >= 2N-1: zero at equal costs, as
      section 6 of arXiv:2401.10241 says; beyond that, derived here.
    - dualpipe-v: F + (2N-3) O - (3N-4) W - min((N-2) I, N F - I) for N >= 2, derived here. The table of DeepSeek's
      DualPipe, whose PP counts stages, gives (N-1)(O + B - 3W): the same at F = I = W with O = F + B, and an upper
      bound for W <= F <= I and O <= F + B. `docs/invariants/schedule.bubble.md` says why they differ.
    """
    return _idle(name, ranks, microbatches, virtual, costs)[0].own


def makespan_bounds(
    name: str, forward: Sequence[Fraction], backward: Sequence[Fraction], microbatches: int
) -> tuple[Fraction, Fraction]:
    """Least and greatest time that `gpipe` or `1f1b` can take, at costs of each stage that may differ.

    GPipe: both are sum F + (M-1) max F + sum B + (M-1) max B, a permutation flow shop each way: no stage gets its first
    gradient before it has run its last forward. 1F1B: at least max_s [sum_(j<s) (F+B)_j + M (F+B)_s], since stage s
    starts after the first forward of the earlier stages, and they have a backward to run after its last; at most
    GPipe's. Domain: all N, M >= 1. Source: derived here, and checked by simulation over N <= 8 and M <= 16.
    """
    if name not in ("gpipe", "1f1b"):
        raise UsageError(f"schedule {name!r}: no bounds at unequal costs; expected one of gpipe, 1f1b")
    checked(name, len(forward), microbatches)
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


def in_flight_bound(name: str, stage: int, ranks: int, microbatches: int, virtual: int = 1) -> int:
    """Microbatches that `stage` holds at its peak, from the start of F to the end of B, or of W where B is split.

    gpipe M; 1f1b min(M, N-s); zb-h1 min(M, N) and zb-h2 min(M, 2N-1) on every stage; zb-v and dualpipe-v min(M, 2N-s).
    For interleaved-1f1b, chunk c of rank r holds a microbatch for D = 2(v-1-c) N + 2(N-1-r) + 1 forwards of its rank
    where N divides M: min(M, min(N, D) + min(N, max(0, D - vN))). Where groups are larger or differ it is counted.

    None but gpipe grows with M. Sources: Megatron-LM, arXiv:2104.04473, section 2.2.1, for 1F1B; section 2 of
    arXiv:2401.10241 for ZB-H1 and ZB-H2; else derived here. Domain: wherever the family exists; elsewhere a
    `UsageError`, as for a stage that is not there.
    """
    stages = ranks * (checked(name, ranks, microbatches, virtual).virtual or virtual)
    _check_place(name, "stage", stage, stages)
    if name == "interleaved-1f1b":
        return _interleaved_in_flight(*divmod(stage, ranks), ranks, microbatches, virtual)
    limits = {"gpipe": microbatches, "zb-h1": ranks, "zb-h2": 2 * ranks - 1}
    return min(microbatches, limits.get(name, stages - stage))


def rank_in_flight_bound(name: str, rank: int, ranks: int, microbatches: int, virtual: int = 1) -> int:
    """Microbatches that the stages of `rank` hold at its peak, all together; one on two stages counts twice.

    With one stage a rank it is that stage's. interleaved-1f1b min(vM, (v-1) G + 2(N-1-r) + 1), with G the size of the
    largest group; zb-v min(2M, M+1+r, 2N); dualpipe-v 2N+1, which DeepSeek writes PP+1, for 2N stages. A stage of these
    holds 1/v of what a stage of `1f1b` does: v times as many are as much memory. Sources and domain as for
    `in_flight_bound`.
    """
    fixed = checked(name, ranks, microbatches, virtual).virtual
    _check_place(name, "rank", rank, ranks)
    if fixed == 1:
        return in_flight_bound(name, rank, ranks, microbatches)
    if name == "interleaved-1f1b":
        large = int(group_sizes(ranks, microbatches)[0])
        return min(virtual * microbatches, (virtual - 1) * large + 2 * (ranks - 1 - rank) + 1)
    return 2 * ranks + 1 if name == "dualpipe-v" else min(2 * microbatches, microbatches + 1 + rank, 2 * ranks)


def _interleaved_in_flight(chunk: int, rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    """Most forwards of a chunk that have no backward yet; a backward is as many places behind as its rank holds."""
    sizes = group_sizes(ranks, microbatches)
    size = np.repeat(sizes, sizes).astype(np.int64)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    within = np.arange(microbatches) - first
    forward = virtual * first + chunk * size + within
    behind = (virtual - 1) * int(sizes[0]) + 2 * (ranks - 1 - rank) + 1
    backward = virtual * first + (virtual - 1 - chunk) * size + within + behind
    return int((np.arange(1, microbatches + 1) - np.searchsorted(backward, forward, side="right")).max())


def _check_place(name: str, label: str, place: int, size: int) -> None:
    if not 0 <= place < size:
        raise UsageError(f"schedule {name}: {label}={place}: expected 0 to {size - 1}")


def _idle(name: str, ranks: int, microbatches: int, virtual: int, costs: Costs) -> tuple[_Idle, _Times]:
    reason, times = outside(name, ranks, microbatches, virtual, costs), _times(costs)
    if reason is not None or times is None:
        raise UsageError(f"schedule {reason}")
    if name in _SPLIT:
        return _SPLIT[name](ranks, microbatches, times), times
    return _one_for_one(ranks, microbatches, virtual, times), times


def _one_for_one(ranks: int, microbatches: int, virtual: int, times: _Times) -> _Idle:
    longer, shorter = max(microbatches, ranks), min(microbatches, ranks)
    idle = (virtual * (longer - microbatches) + shorter - 1) * times.all
    return _Idle(idle, idle)


def _zb_h1(ranks: int, microbatches: int, times: _Times) -> _Idle:
    forward, inputs, weights = times.forward, times.input_gradient, times.weight_gradient
    wait, filled = (ranks - 1) * (forward + inputs), min(microbatches, ranks) - 1
    return _Idle(wait - filled * min(forward, inputs, weights), wait - filled * min(forward, weights))


def _zb_h2(ranks: int, microbatches: int, times: _Times) -> _Idle:
    forward, inputs, weights = times.forward, times.input_gradient, times.weight_gradient
    wait = (ranks - 1) * (forward + inputs)
    pairs, single = divmod(min(microbatches, 2 * ranks - 1) - 1, 2)
    twice = 2 * min(forward, weights)
    return _Idle(
        wait - pairs * min(inputs, twice) - single * min(forward, inputs, weights),
        wait - pairs * min(forward + inputs, twice) - single * min(forward, weights),
    )


def _zb_v(ranks: int, microbatches: int, times: _Times) -> _Idle:
    forward, inputs, weights = times.forward, times.input_gradient, times.weight_gradient
    few, all_ways = min(microbatches, ranks), 2 * ranks - 1
    filled = (few - 1) * forward + (min(microbatches, all_ways) - few) * weights
    own = 2 * ((ranks - 1) * (forward + inputs) - filled)
    if microbatches < ranks:
        return _Idle(own, own)
    return _Idle(max(own, (ranks - 1) * inputs + max(0, all_ways - microbatches) * (inputs - weights)), own)


def _dualpipe_v(ranks: int, microbatches: int, times: _Times) -> _Idle:
    overlaps = 2 * microbatches - 3 * ranks + 1
    if ranks == 1:
        return _Idle(Fraction(), Fraction(), overlaps - 1)
    forward, inputs = times.forward, times.input_gradient
    idle = forward + (2 * ranks - 3) * times.overlapped - (3 * ranks - 4) * times.weight_gradient
    idle -= min((ranks - 2) * inputs, ranks * forward - inputs)
    return _Idle(idle, idle, overlaps)


_SPLIT: Final[Mapping[str, Callable[[int, int, _Times], _Idle]]] = {
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-v": _zb_v,
    "dualpipe-v": _dualpipe_v,
}
"""Families that split backwards."""


def _times(costs: Costs) -> _Times | None:
    """The costs of any stage; None where stages differ."""
    whole = costs.forward, costs.input_gradient, costs.weight_gradient
    columns = [value if isinstance(value, Sequence) else (value,) for value in whole]
    pairs = costs.overlapped if isinstance(costs.overlapped, Sequence) else (costs.overlapped,)
    if any(len(set(column)) != 1 for column in (*columns, pairs)):
        return None
    forward, inputs, weights = (Fraction(column[0]) for column in columns)
    return _Times(forward, inputs, weights, forward + inputs + weights if pairs[0] is None else Fraction(pairs[0]))
