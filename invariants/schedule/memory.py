"""Memory for what has an entry an action.

To touch a page for the first time costs as much as to judge hundreds of actions. Large pages are 512 times fewer, and
where the system gives them on request (`madvise`, on Linux), columns ask for them. numpy does so from 4 MB on.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

_PAGE: Final = 2**21
_WORTH_IT: Final = _PAGE // 4
"""Bytes from which on clearing a large page takes less than the small ones that it stands for."""


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """`np.zeros`, in large pages where it is large."""
    kind = np.dtype(dtype)
    size = prod(shape) if isinstance(shape, tuple) else shape
    if size * kind.itemsize < _WORTH_IT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(shape, kind)
    whole = -(-size * kind.itemsize // _PAGE) * _PAGE
    try:
        pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without large pages, or no memory, about which numpy has an error of its own
        return np.zeros(shape, kind)
    return np.frombuffer(pages, kind, size).reshape(shape)


def columns(size: int, *dtypes: DTypeLike) -> tuple[NDArray[Any], ...]:
    """Columns of `size` entries each, all 0, side by side in one piece of memory; of falling item sizes."""
    kinds = [np.dtype(dtype) for dtype in dtypes]
    block = zeros(size * sum(kind.itemsize for kind in kinds), np.uint8)
    ends = np.cumsum([size * kind.itemsize for kind in kinds]).tolist()
    return tuple(block[end - size * kind.itemsize : end].view(kind) for end, kind in zip(ends, kinds, strict=True))
