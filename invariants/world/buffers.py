"""Whether buffers of messages keep their contents until they are sent, and get all of theirs when received."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from invariants.communication import CHANGED, SEND, UNWRITTEN

_PATTERNS = {8: 0x7FF8A5A5A5A5A5A5, 4: 0x7FC0A5A5, 2: 0x7FA5, 1: 0xA5}
"""By bytes of an element: a number that no computation makes; NaN as float64, float32, bfloat16 and float16."""
_SURE = 8
"""Bytes at the end of a buffer that must all keep the pattern before it counts as not written."""
_TOO_FEW = 4
"""Bytes of a buffer so small that its contents may be the pattern."""


class Buffers:
    """Watches the buffers of point-to-point operations; `found(number, flaw)` is told what it sees.

    A buffer to be received into is filled with a pattern: who reads it before the receive is done computes with NaN.
    """

    def __init__(self, found: Callable[[int, int], None]) -> None:
        self._found = found

    def posted(self, kind: str, number: int, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """Look at the buffers of operation `number` now; what to call when it is done."""
        views = [view for tensor in tensors if (view := _bytes(tensor)) is not None]
        if not views:
            return None
        if kind == SEND:
            before = [zlib.crc32(view.data) for view in views]

            def sent() -> None:
                if [zlib.crc32(view.data) for view in views] != before:
                    self._found(number, CHANGED)

            return sent
        patterns = [_fill(view, tensor.element_size()) for view, tensor in zip(views, tensors, strict=True)]

        def received() -> None:
            for view, pattern in zip(views, patterns, strict=True):
                if len(view) < _TOO_FEW:
                    continue
                end = min(len(view), max(_SURE, pattern.itemsize))
                if np.array_equal(view[-end:], np.resize(pattern.view(np.uint8), len(view))[-end:]):
                    self._found(number, UNWRITTEN)

        return received


def _bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """The bytes of a dense tensor in the main memory, shared with it; None of another, or of none."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if not tensor.numel():
        return None
    # Writing through numpy leaves the tensor's version alone, as the backend's own writing does.
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()


def _fill(view: np.ndarray[tuple[int], np.dtype[np.uint8]], size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Fill with the pattern of elements of `size` bytes; the pattern."""
    width = size if size in _PATTERNS else 1
    pattern = np.array([_PATTERNS[width]], dtype=f"<u{width}").view(np.uint8)
    view[:] = np.resize(pattern, len(view))
    return pattern
