"""Pieces of tensors: where they lie in the whole, their digests, and their way through a scratch folder.

A piece is a contiguous range of the flattened whole; what a trainer holds as slices of several dimensions is several
pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from invariants.errors import UsageError
from invariants.evidence import Owned, Print
from invariants.target import MISSING, Held


@dataclass(frozen=True)
class Piece:
    """Elements `lo..hi-1` of the flattened whole `name`; `values` is None where a tensor should be and is not."""

    name: str
    lo: int
    hi: int
    whole: tuple[int, ...]
    state_key: str | None
    group: int
    role: str
    trainable: bool
    values: Tensor | None


def pieces_of(held: Iterable[Held]) -> Iterator[Piece]:
    """Cut what a trainer holds into pieces on the CPU; a place that does not fit its tensor is a `UsageError`."""
    if not isinstance(held, Iterable):
        raise UsageError(f"held returned a {type(held).__name__}: expected Held objects, none where there is nothing")
    for part in held:
        _check(part)
        size = torch.Size(part.global_shape).numel()
        ranges = _ranges(part, size)
        tensor = None if part.tensor is MISSING else part.tensor.detach().cpu().reshape(-1)
        elements = sum(hi - lo for lo, hi, _ in ranges)
        if tensor is not None and tensor.numel() != elements:
            state = f", state {part.state_key!r}" if part.state_key else ""
            raise UsageError(
                f"held {part.name}{state}: a tensor of {tensor.numel()} elements for a place of {elements}; "
                "global_shape is the whole tensor's own shape, () for a step counter"
            )
        for lo, hi, start in ranges:
            values = None if tensor is None else tensor[start : start + hi - lo]
            yield Piece(
                part.name, lo, hi, part.global_shape, part.state_key, part.group, part.role, part.trainable, values
            )


def _check(part: Held) -> None:
    if not isinstance(part, Held):
        raise UsageError(f"held yielded a {type(part).__name__}: expected Held objects")
    if not isinstance(part.name, str):
        raise UsageError(f"held: a name of {part.name!r}: expected a text that names one tensor on all ranks")
    if part.tensor is MISSING:
        return
    what = part.name if part.state_key is None else f"{part.name}, state {part.state_key!r}"
    if not isinstance(part.tensor, Tensor):
        raise UsageError(f"held {what}: {type(part.tensor).__name__} for a tensor: where there is none, say MISSING")
    if part.tensor.is_complex() or part.tensor.layout is not torch.strided:
        raise UsageError(
            f"held {what}: {part.tensor.dtype}, {part.tensor.layout}: expected a dense tensor of real numbers"
        )


def _ranges(part: Held, size: int) -> list[tuple[int, int, int]]:
    """Contiguous ranges of the flattened whole, and where each starts in the flattened tensor."""
    if part.flat_range is not None:
        lo, hi = part.flat_range
        if not 0 <= lo <= hi <= size:
            raise UsageError(f"held {part.name}: flat_range {part.flat_range} lies outside of {size} elements")
        return [(lo, hi, 0)]
    if part.slices is None:
        return [(0, size, 0)]
    lengths = part.global_shape
    if len(part.slices) != len(lengths) or any(
        not 0 <= a <= b <= length for (a, b), length in zip(part.slices, lengths, strict=False)
    ):
        raise UsageError(f"held {part.name}: slices {part.slices} lie outside of the shape {lengths}")
    index = torch.arange(size).view(part.global_shape)[tuple(slice(a, b) for a, b in part.slices)].reshape(-1)
    if not index.numel():
        return []
    starts = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist()]
    ends = [*starts[1:], index.numel()]
    return [(int(index[a]), int(index[a]) + b - a, a) for a, b in zip(starts, ends, strict=True) if b > a]


def digest_of(data: bytes) -> str:
    """The digest that stands for bytes in evidence."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def print_of(piece: Piece) -> Print:
    """Digest and norm of a piece that is there."""
    assert piece.values is not None
    # A copy, not `contiguous`: that leaves any stride to a dimension of one element.
    values = piece.values.clone(memory_format=torch.contiguous_format)
    digest = digest_of(values.view(torch.uint8).numpy().tobytes())
    norm = float(values.double().norm())
    return Print(piece.name, piece.lo, piece.hi, _dtype(values), digest, norm, piece.state_key)


def prints_of(held: Iterable[Held]) -> tuple[Print, ...]:
    """Digests of all that is there."""
    return tuple(print_of(piece) for piece in pieces_of(held) if piece.values is not None)


def owned_of(held: Iterable[Held], rank: int, kind: str) -> Iterator[Owned]:
    """Place and bytes of all that is there."""
    for piece in pieces_of(held):
        if piece.values is not None:
            yield Owned(
                rank,
                kind,
                piece.name,
                piece.lo,
                piece.hi,
                piece.values.numel() * piece.values.element_size(),
                piece.group,
                piece.role,
                piece.trainable,
                piece.state_key,
                torch.Size(piece.whole).numel(),
            )


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def dump(path: Path, pieces: Iterable[Piece]) -> None:
    """Write pieces into one file: one flat tensor a dtype, and where each piece lies in it."""
    values: dict[str, list[Tensor]] = {}
    starts: dict[str, int] = {}
    places = []
    for piece in pieces:
        place = {**vars(piece), "values": None}
        if piece.values is not None:
            dtype = _dtype(piece.values)
            place["values"] = dtype, starts.get(dtype, 0)
            values.setdefault(dtype, []).append(piece.values)
            starts[dtype] = starts.get(dtype, 0) + piece.values.numel()
        places.append(place)
    save_file({dtype: torch.cat(parts) for dtype, parts in values.items()}, path, {"pieces": json.dumps(places)})


def read(path: Path) -> Iterator[Piece]:
    """Read what `dump` wrote."""
    with safe_open(path, framework="pt") as file:
        flat = {dtype: file.get_tensor(dtype) for dtype in file.keys()}  # noqa: SIM118 - it is no mapping
        places = json.loads(file.metadata()["pieces"])
    for place in places:
        values = None
        if place["values"] is not None:
            dtype, start = place["values"]
            values = flat[dtype][start : start + place["hi"] - place["lo"]]
        yield Piece(**{**place, "whole": tuple(place["whole"]), "values": values})
