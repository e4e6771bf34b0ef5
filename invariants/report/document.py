"""What machines read: JSON documents with a version, each file written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from invariants.errors import UsageError
from invariants.invariant import Verdict

if TYPE_CHECKING:
    from invariants.campaign import Judgement
    from invariants.matrix import Row

VERSION = 1
"""Of the schema: changed when a key changes its meaning or goes away, not when one is added."""


def check_writable(path: Path, option: str = "--json") -> Path:
    """The file that `path` leads to; `UsageError` where none can be written there, so that no work is done in vain.

    `option` is how the user named it.
    """
    path = path.resolve()
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: folder {path.parent} does not exist; make it, or name another file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{option} {path}: expected the name of a file, and this is none")
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:  # what a folder's mode says is no proof
            file.write(b"{}")
    except OSError as error:
        raise UsageError(
            f"{option} {path}: folder {path.parent} cannot be written to: {error.strerror}; name a file in another one"
        ) from error
    return path


def write_last(path: Path, document: Mapping[str, Any], status: int) -> int:
    """Write the document of a command; the exit status, which is `status` unless the file cannot be written.

    That is told in one line, and makes 3 of any status but 1: a violation that was printed stays one.
    """
    try:
        write(path, document)
    except OSError as error:
        print(f"--json {path}: could not be written: {error.strerror}", file=sys.stderr)
        return status if status == 1 else 3
    return status


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write strict JSON, headed by the schema's version; under its name it appears whole."""
    text = json.dumps({"version": VERSION, **document}, indent=2, allow_nan=False)
    with whole(path) as file:
        file.write(f"{text}\n".encode())


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes its name when the context ends; where that raises, no file is left."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - it has a descriptor
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # noqa: PTH101
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108
        raise


def judgement_document(judgement: Judgement, promise: str, replay: str | None) -> dict[str, Any]:
    """An invariant's judgement; `case`, `violations` and `replay` are those of the case that is shown, if one is."""
    return {
        "id": judgement.invariant,
        "promise": promise,
        "verdict": judgement.status,
        "reason": judgement.reason,
        "cases": dict(judgement.counts),
        "shown": verdict_document(judgement.verdict, replay) if judgement.verdict else None,
        "known": [{**asdict(known), "cases": count} for known, count in judgement.known],
        "extra_runs": judgement.extra_runs,
    }


def verdict_document(verdict: Verdict, replay: str | None) -> dict[str, Any]:
    """A verdict on one case; an `excess` that has no measure is null, since JSON has no infinity."""
    return {
        "case": str(verdict.case),
        "verdict": verdict.status,
        "reason": verdict.reason,
        "violations": [
            {**asdict(each), "excess": each.excess if math.isfinite(each.excess) else None}
            for each in verdict.violations
        ],
        "replay": replay,
    }


def row_document(row: Row, invariants: Sequence[str], replay: str | None) -> dict[str, Any]:
    """A row of the matrix; `marks` names the invariants that were violated or unknown under the fault alone."""
    marks = {each: "violated" if each in row.violated else "unknown" for each in invariants if each in row.marked}
    return {
        "fault": row.name,
        "report": row.report,
        "harmless": row.harmless,
        "outcome": row.outcome,
        "passed": row.passed,
        "cases": [str(case) for case in row.cases],
        "marks": marks,
        "replay": replay,
    }
