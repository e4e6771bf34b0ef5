"""Whole tensors from the pieces that ranks dumped, and their comparison with what they should be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from invariants.errors import UsageError
from invariants.evidence import Deviation
from invariants.probes.pieces import Piece, read
from invariants.probes.session import dump_path

Values = Mapping[str, Tensor]
"""Flattened tensors by name."""


@dataclass
class Whole:
    """One tensor as all ranks hold it: `values` flattened, from the lowest rank where copies differ."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    values: Tensor
    covered: Tensor
    pieces: list[tuple[int, Piece]] = field(default_factory=list)

    @property
    def present(self) -> bool:
        """Whether any rank holds any of it."""
        return bool(self.covered.any()) or self.covered.numel() == 0


def gather(folder: Path, moment: str, step: int, ranks: int) -> dict[str, Whole] | None:
    """Put together what `ranks` ranks dumped; None where one of them dumped nothing at that moment."""
    paths = [dump_path(folder, moment, step, rank) for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return None
    found: dict[str, Whole] = {}
    for rank, path in enumerate(paths):
        for piece in read(path):
            if piece.role == "value":
                _add(found, rank, piece)
    return found


def _add(found: dict[str, Whole], rank: int, piece: Piece) -> None:
    whole = found.get(piece.name)
    if whole is None:
        size = math.prod(piece.whole)
        dtype = torch.float32 if piece.values is None else piece.values.dtype
        empty = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=torch.bool)
        whole = found[piece.name] = Whole(piece.name, piece.whole, piece.trainable, *empty)
    if whole.shape != piece.whole:
        raise UsageError(
            f"held {piece.name}: rank {rank} says a global_shape of {piece.whole}, another piece {whole.shape}; "
            "one name is one tensor"
        )
    whole.pieces.append((rank, piece))
    if piece.values is None:
        return
    if whole.values.dtype != piece.values.dtype:
        whole.values = whole.values.to(torch.promote_types(whole.values.dtype, piece.values.dtype))
    here = slice(piece.lo, piece.hi)
    whole.values[here] = torch.where(whole.covered[here], whole.values[here], piece.values)
    whole.covered[here] = True


def compare(
    observed: Mapping[str, Whole], expected: Values, tolerance: Mapping[str, float], step: int, *, resumed: bool
) -> Iterator[Deviation]:
    """Yield the worst element of each expected tensor over all ranks, and what is missing of it."""
    for name, values in expected.items():
        place = _Place(name, step, tolerance[name], resumed)
        whole = observed.get(name)
        pieces = [] if whole is None else whole.pieces
        covered = torch.zeros(values.numel(), dtype=torch.bool) if whole is None else whole.covered
        present = [place.held(rank, piece, values.double()) for rank, piece in pieces if piece.hi > piece.lo]
        lacking = [] if covered.all() else [place.lacking(-1, values.double().masked_fill(covered, 0))]
        # On a tie the rank that says that it lacks the element, not the world that has none.
        yield from sorted([*lacking, *present], key=lambda seen: seen.error)[-1:]


@dataclass(frozen=True)
class _Place:
    name: str
    step: int
    tolerance: float
    resumed: bool

    def held(self, rank: int, piece: Piece, expected: Tensor) -> Deviation:
        here = expected[piece.lo : piece.hi]
        if piece.values is None:
            return self.lacking(rank, torch.zeros_like(expected).index_copy(0, torch.arange(piece.lo, piece.hi), here))
        errors = (piece.values.double() - here).abs().nan_to_num(nan=math.inf)
        worst = int(errors.argmax())
        value, should, error = (float(each[worst]) for each in (piece.values, here, errors))
        return self._deviation(rank, piece.lo + worst, should, value, error)

    def lacking(self, rank: int, expected: Tensor) -> Deviation:
        worst = int(expected.abs().argmax())
        should = float(expected[worst])
        return self._deviation(rank, worst, should, math.nan, abs(should), missing=True)

    def _deviation(
        self, rank: int, index: int, expected: float, observed: float, error: float, *, missing: bool = False
    ) -> Deviation:
        return Deviation(
            self.name, self.step, rank, index, expected, observed, error, self.tolerance, missing, self.resumed
        )


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest: half of the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def largest(tensors: Iterable[Tensor]) -> float:
    """Largest finite absolute value over all tensors, 0 where there is none."""
    return max((float(t.double().abs().nan_to_num(nan=0, posinf=0).max()) for t in tensors if t.numel()), default=0.0)


FAR = 2**20
"""Rounding errors, in units of the largest value, that no small model piles up: 6 % in float32, 1e-10 in float64."""


def tolerances(exact: Values, rounded: Sequence[Values], dtype: torch.dtype, scale: float = 1.0) -> dict[str, float]:
    """8 times the largest error among `rounded`, per tensor, floored by 16 u over the whole model, all times `scale`.

    `rounded` and u are of `dtype`; `scale` leads from there to the roundoff of another one.

    Raises `UsageError` where that error is no rounding: it would make any deviation tolerable.
    """
    unit = unit_roundoff(dtype) * largest(exact.values())
    errors = {
        name: largest(other[name].double() - values.double() for other in rounded) for name, values in exact.items()
    }
    for name, error in errors.items():
        if error > FAR * unit + torch.finfo(dtype).tiny:
            raise UsageError(
                f"reference: {name} in its own precision is far from itself in float64, by {error:.3g}; on one rank a "
                "step must train on the whole of each batch, and depend on parameters and batch alone: on no buffer, "
                "count of steps or random generator"
            )
    return {name: scale * max(8 * error, 16 * unit) for name, error in errors.items()}
