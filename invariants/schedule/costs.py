"""What a schedule's actions cost, exactly: numbers become whole ticks of one unit, so that times can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.computations import Computations
from invariants.schedule.table import B, F, I, W

Number = int | Fraction | Decimal | float
PerStage = Number | Sequence[Number]
"""One number for all stages, or one a stage."""
PerLink = Number | Mapping[tuple[int, int], Number]
"""One number for all links, or one for each (sending rank, receiving rank)."""

FROM_FORWARD, FROM_GRADIENT = 0, 1
"""First index of what is kept for each kind of message: a stage's output, or the gradient of its input."""

_TOO_LATE: Final = 2**63
_TOO_LARGE: Final = 2**48
"""Bytes of so many microbatches that no pipeline holds them still fit into 64 bits."""


@dataclass(frozen=True)
class Costs:
    """Times in a unit of the user's choice; all are kept as exact fractions, floats as the decimal that they print.

    `forward` (F), `input_gradient` (I) and `weight_gradient` (W) are times of one microbatch on a stage; a full
    backward (B) takes I + W. `overlapped` is the time of a compound cell of two or more computations, by the stage of
    its first one; None: the sum of its parts.

    A message from one rank to another arrives `latency` + `message_bytes` / `bandwidth` after it is sent; messages of
    one link (an ordered pair of ranks) share its bandwidth one after another. `message_bytes` is the output of each
    stage for one microbatch, and the gradient that comes back for it; `bandwidth` is in bytes a unit of time, None:
    unlimited. With `overlap` a rank computes while it sends; without, it computes nothing while its message occupies
    the link (bytes / bandwidth, not the latency), as if it sent in the stream that computes; the receiver is free.

    `activation_bytes` is what one microbatch in flight holds on a stage, in whole bytes; None: not known.

    A number that is negative, not finite or no number, a bandwidth of 0, and a bandwidth without `message_bytes` or the
    other way round, are each a `UsageError`.
    """

    forward: PerStage = 1
    input_gradient: PerStage = 1
    weight_gradient: PerStage = 1
    overlapped: PerStage | None = None
    activation_bytes: PerStage | None = None
    latency: PerLink = 0
    bandwidth: PerLink | None = None
    message_bytes: PerStage | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        if (self.bandwidth is None) != (self.message_bytes is None):
            lone, other = ("message_bytes", "bandwidth") if self.bandwidth is None else ("bandwidth", "message_bytes")
            raise UsageError(f"costs: {lone} without {other}: expected both or neither")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "overlap" and not (value is None and field.default is None):
                kept = _per_link if field.name in ("latency", "bandwidth") else _per_stage
                object.__setattr__(self, field.name, kept(field.name, value))
        if self.activation_bytes is not None:
            for size in _entries(self.activation_bytes):
                if Fraction(size).denominator != 1 or size >= _TOO_LARGE:
                    raise UsageError(f"costs: activation_bytes={size}: expected whole bytes, fewer than 2^48")

    def bytes_of(self, stages: int) -> NDArray[np.int64] | None:
        """`activation_bytes` of each stage [S]; None where they are not known."""
        if self.activation_bytes is None:
            return None
        sizes = _column("activation_bytes", self.activation_bytes, stages)
        return np.full(stages, [int(size) for size in sizes], np.int64)


@dataclass(frozen=True)
class Ticks:
    """Costs of one schedule of S stages, as numbers to compute with.

    `took` [4, S] by the operation's code (F, I, W, B), `pair` [S] of a compound cell, -1 for the sum of its parts. Of
    the message that a stage sends [2, S], by kind: `link`, a number for its ordered pair of ranks, -1 where there is no
    message or it costs nothing; `transfer`, for which it occupies the link; `latency`. `links` are the pairs of ranks.
    All are int64 counts of `unit`, or, where these would not fit (`exact` is False), float64 and a unit of 1.
    """

    unit: Fraction
    exact: bool
    took: NDArray[Any]
    pair: NDArray[Any]
    link: NDArray[np.int32]
    transfer: NDArray[Any]
    latency: NDArray[Any]
    links: tuple[tuple[int, int], ...]


def ticks(costs: Costs, work: Computations) -> Ticks:
    """Price a schedule's computations and messages; costs per stage or per link that do not fit it: a `UsageError`."""
    stages = len(work.home)
    forward = _column("forward", costs.forward, stages)
    inputs = _column("input_gradient", costs.input_gradient, stages)
    weights = _column("weight_gradient", costs.weight_gradient, stages)
    pair = () if costs.overlapped is None else _column("overlapped", costs.overlapped, stages)
    link, links, transfer, latency = _messages(costs, work)
    columns = (forward, inputs, weights, pair, transfer, latency)
    parts = math.lcm(*[number.denominator for column in columns for number in column])
    numbers: list[list[Any]] = [[number.numerator * (parts // number.denominator) for number in it] for it in columns]
    exact = sum(max(column, default=0) for column in numbers) * len(work.code) < _TOO_LATE
    if not exact:
        numbers = [[float(number) for number in column] for column in columns]
    kind = np.int64 if exact else np.float64
    took = np.empty((4, stages), kind)
    took[F], took[I], took[W] = numbers[:3]
    took[B] = took[I] + took[W]
    return Ticks(
        unit=Fraction(1, parts) if exact else Fraction(1),
        exact=exact,
        took=took,
        pair=np.full(stages, numbers[3] or -1, kind),
        link=link,
        transfer=np.full(2 * stages, numbers[4] or 0, kind).reshape(2, stages),
        latency=np.full(2 * stages, numbers[5] or 0, kind).reshape(2, stages),
        links=links,
    )


def _messages(
    costs: Costs, work: Computations
) -> tuple[NDArray[np.int32], tuple[tuple[int, int], ...], tuple[Fraction, ...], tuple[Fraction, ...]]:
    """Link of each message [2, S], the links, and for each message the transfer and the latency; () where all are 0."""
    home, count, stages = work.home, work.counts, len(work.home)
    link = np.full((2, stages), -1, np.int32)
    if costs.bandwidth is None and costs.latency == 0:
        return link, (), (), ()
    sizes = None if costs.message_bytes is None else _column("message_bytes", costs.message_bytes, stages)
    links: dict[tuple[int, int], int] = {}
    transfer, latency = [Fraction()] * (2 * stages), [Fraction()] * (2 * stages)
    backward = count[I] + count[B]
    for kind, step, needs in ((FROM_FORWARD, 1, count[F]), (FROM_GRADIENT, -1, backward)):
        for stage in range(stages):
            to = stage + step
            if not 0 <= to < stages or not needs[to] or home[stage] in (-1, home[to]):
                continue
            pair = int(home[stage]), int(home[to])
            link[kind, stage] = links.setdefault(pair, len(links))
            latency[kind * stages + stage] = _of_link("latency", costs.latency, pair)
            if sizes is not None and costs.bandwidth is not None:
                size = sizes[min(stage, to) if len(sizes) > 1 else 0]
                transfer[kind * stages + stage] = size / _of_link("bandwidth", costs.bandwidth, pair)
    return link, tuple(links), tuple(transfer), tuple(latency)


def _per_stage(name: str, value: Any) -> Fraction | tuple[Fraction, ...]:
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return tuple(exact_number(name, number) for number in value)
    return exact_number(name, value)


def _per_link(name: str, value: Any) -> Fraction | dict[tuple[int, int], Fraction]:
    several = isinstance(value, Mapping)
    numbers = {link: exact_number(name, number) for link, number in (value if several else {(0, 0): value}).items()}
    if name == "bandwidth" and 0 in numbers.values():
        raise UsageError("costs: bandwidth=0: expected more than 0 bytes a unit of time")
    return numbers if several else numbers[0, 0]


def exact_number(name: str, value: Any) -> Fraction:
    """A cost as a fraction; `name` is for the `UsageError` about one that is negative, not finite or no number."""
    try:
        if isinstance(value, Fraction):
            number = value
        elif isinstance(value, Integral):
            number = Fraction(int(value))
        elif isinstance(value, Decimal):
            number = Fraction(value)
        elif isinstance(value, Real):
            number = Fraction(repr(float(value)))
        else:
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(f"costs: {name}={value!r}: expected a finite number") from None
    if number < 0:
        raise UsageError(f"costs: {name}={value}: expected 0 or more")
    return number


def _entries(value: PerStage) -> Sequence[Number]:
    return value if isinstance(value, Sequence) else (value,)


def _column(name: str, value: PerStage, stages: int) -> tuple[Fraction, ...]:
    """One number for all stages, as a tuple of length 1, or one a stage."""
    if not isinstance(value, Sequence):
        return (exact_number(name, value),)
    if len(value) != stages:
        raise UsageError(f"costs: {name}: {len(value)} numbers for {stages} stages: expected one a stage, or one")
    return tuple(exact_number(name, number) for number in value)


def _of_link(name: str, value: PerLink, link: tuple[int, int]) -> Fraction:
    if not isinstance(value, Mapping):
        return exact_number(name, value)
    if link not in value:
        raise UsageError(f"costs: {name} of link {link[0]}->{link[1]} is missing: expected one for each link in use")
    return exact_number(name, value[link])
