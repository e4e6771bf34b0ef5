"""Where in a program an operation is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

_BATCH = "batch_isend_irecv"


class Callers:
    """Looks at the stack below the recorder; `torch` is the folder of that."""

    def __init__(self, torch: Path) -> None:
        self._not_theirs = (str(torch), str(Path(__file__).parent), "<")
        self._sources: dict[tuple[int, int], tuple[str, CodeType]] = {}
        self._foreign: dict[str, bool] = {}
        self._batch = (0, 0)
        self._batches = 0

    def of_operation(self) -> tuple[str, int]:
        """`file:line` of the innermost frame that is neither torch's nor ours, and the batch that the call is part of.

        gloo gets the operations of `batch_isend_irecv` one by one; only the stack tells that they are one for NCCL.
        """
        frame: FrameType | None = sys._getframe(3)  # the caller of a group's method
        batch = 0
        while frame is not None:
            code = frame.f_code
            foreign = self._foreign.get(code.co_filename)
            if foreign is None:
                foreign = self._foreign[code.co_filename] = self._is_foreign(code.co_filename)
            if foreign:
                # To hash code, or to find its line, is to go through all of it. What is kept keeps its identity.
                known = self._sources.get((id(code), frame.f_lasti))
                if known is None:
                    known = f"{_short(code.co_filename)}:{frame.f_lineno}", code
                    self._sources[id(code), frame.f_lasti] = known
                return known[0], batch
            if code.co_name == _BATCH:
                batch = self._batch_of(frame)
            frame = frame.f_back
        return "", batch

    def _batch_of(self, frame: FrameType) -> int:
        """The number of the batch that a call of `batch_isend_irecv` posts the next operation of."""
        # Not by the frame itself: it would keep alive all that its callers hold. The next one may have its identity.
        known, left = self._batch
        if known != id(frame) or not left:
            left = len(frame.f_locals[frame.f_code.co_varnames[0]])
            self._batches += 1
        self._batch = id(frame), left - 1
        return self._batches

    def _is_foreign(self, file: str) -> bool:
        return not file.startswith(self._not_theirs) and not file.endswith("contextlib.py")


def _short(file: str) -> str:
    """Relative to the working directory where it lies inside."""
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
