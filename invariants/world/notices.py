"""Warnings and log records of ranks, on their way to the controller's own.

Each rank writes its own to a file in the world's private folder, a line of JSON each. Not to the socket: a file never
blocks, outlives a rank that is killed or stuck, and any thread may write to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Levels = Mapping[str, int]
"""Levels that loggers were given, by name."""
Notice = tuple[str, int, dict[str, Any]]
"""`warning` or `log`, the rank, and what it was."""
NOTICES = "notices"


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.{NOTICES}"


class Relay(logging.Handler):
    """On a rank: notes what is warned of and logged."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._file = _file(folder, rank)
        self._descriptor = -1
        self._noted: set[tuple[object, ...]] = set()

    def install(self) -> None:
        """From now on, note every warning, whatever its filter here: the controller applies its own."""
        self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        logging.getLogger().addHandler(self)
        warnings.simplefilter("always")
        warnings.showwarning = self.warn

    @contextlib.contextmanager
    def during_call(self, levels: Levels) -> Iterator[None]:
        """Give loggers the controller's levels; forget which warnings were noted before."""
        self._noted.clear()
        before = {}
        for name, level in levels.items():
            logger = logging.getLogger(name)
            if logger.level != level:
                before[logger] = logger.level
                logger.setLevel(level)
        try:
            yield
        finally:
            for logger, level in before.items():
                logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a log record."""
        try:
            told = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info:
                told["exc_text"] = logging.Formatter().formatException(record.exc_info)
            self._note("log", told)
        except Exception:
            self.handleError(record)

    def warn(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,  # noqa: ARG002 - where it would have been printed
        line: str | None = None,  # noqa: ARG002
    ) -> None:
        """Note a warning; once in a call, if all of it is the same."""
        place = (str(message), category, filename, lineno)
        if place in self._noted:
            return
        self._noted.add(place)
        bases = [f"{base.__module__}:{base.__qualname__}" for base in category.__mro__ if issubclass(base, Warning)]
        module = _module_at(filename, lineno)
        self._note(
            "warning", {"text": str(message), "bases": bases, "file": filename, "line": lineno, "module": module}
        )

    def _note(self, kind: str, content: Mapping[str, Any]) -> None:
        os.write(self._descriptor, json.dumps([kind, self._rank, content], default=str).encode() + b"\n")


def _module_at(filename: str, lineno: int) -> str | None:
    """Name of the module that is running this line; filters ask for it."""
    frame = sys._getframe(2)
    while frame is not None and (frame.f_lineno, frame.f_code.co_filename) != (lineno, filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_globals.get("__name__")


def levels() -> Levels:
    """On the controller: the levels of this process's loggers, where they were set."""
    root = logging.getLogger()
    named = ((name, getattr(logger, "level", 0)) for name, logger in root.manager.loggerDict.items())
    return {root.name: root.level, **{name: level for name, level in named if level}}


class Notices:
    """On the controller: what the ranks of one world have noted and nobody has heard of yet."""

    def __init__(self, folder: Path, size: int) -> None:
        self._read = {str(_file(folder, rank)): 0 for rank in range(size)}
        self._registries: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}

    def take(self) -> list[Notice]:
        """Kind, rank and content of each, those of one rank in their order."""
        found = []
        for path, start in self._read.items():
            try:
                if os.stat(path).st_size == start:  # noqa: PTH116 - once a call and rank, so not by way of `Path`
                    continue
            except FileNotFoundError:
                continue
            with Path(path).open("rb") as file:
                file.seek(start)
                whole, newline, _ = file.read().rpartition(b"\n")  # a rank may die while it writes
            self._read[path] = start + len(whole) + len(newline)
            found += [tuple(json.loads(line)) for line in whole.splitlines()]
        return found

    def begin_anew(self) -> None:
        """The files are about to be emptied."""
        self._read = dict.fromkeys(self._read, 0)

    def hand_on(self, notices: list[Notice]) -> None:
        """Log and warn here; raises a warning that this process's filters make an error."""
        logged = ((rank, content) for kind, rank, content in notices if kind == "log")
        for rank, content in sorted(logged, key=lambda item: item[1]["created"]):
            record = logging.makeLogRecord({**content, "rank": rank, "msg": f"[rank {rank}] {content['msg']}"})
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        warned: dict[str, list[int]] = {}
        for kind, rank, content in notices:
            if kind == "warning":
                warned.setdefault(json.dumps(content), []).append(rank)
        for same, ranks in warned.items():
            self._warn(json.loads(same), sorted(set(ranks)))

    def _warn(self, content: dict[str, Any], ranks: list[int]) -> None:
        # Behind the text: filters look at how it begins.
        who = f"({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
        warnings.warn_explicit(
            f"{content['text']} {who}",
            _category(content["bases"]),
            content["file"],
            content["line"],
            content["module"],
            self._registries.setdefault(content["file"], {}),
        )


def _category(bases: list[str]) -> type[Warning]:
    """The warning's class, or the first of its bases, that this process has and can make from a text."""
    for base in bases:
        module, _, name = base.partition(":")
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Warning):
            with contextlib.suppress(TypeError):  # it wants more than a text
                return type(kind(""))
    return UserWarning
