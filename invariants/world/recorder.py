"""Sees every operation of every process group of a rank, and writes it to the rank's record.

Groups are made of a subclass of torch's `ProcessGroup`, see `invariants.world.groups`. Whatever is called on a group
from Python, and what torch calls on it from C++ (DDP's reducer, functional collectives), arrives at its methods, is
noted and handed on to the group's backend.

Not seen: what is done on a backend without its group, groups that C++ makes (`split_group`), waits for a store or for a
future, and whether a program that asks `is_completed` in a loop does anything else.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from invariants.communication import NEW_GROUP, POINT_TO_POINT, SEND, Operation
from invariants.world.buffers import Buffers
from invariants.world.calls import Call
from invariants.world.groups import recorded_group
from invariants.world.record import DIMENSIONS, LOST, OTHERS, POSTED, RING, THREADS, TURNS, WAITING, Reader, Writer

c10d = dist.distributed_c10d
_BATCH = "batch_isend_irecv"
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Identity:
    """A group, as the record names it: torch's name and the global ranks of its members; `text` is both."""

    name: str
    members: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, name: str, members: Sequence[int]) -> Identity:
        """From name and members."""
        return cls(name, tuple(members), json.dumps((name, tuple(members))))


class Recorder:
    """Writes what this process, rank `rank` of its world, communicates to `path`, from `install` on.

    `label` is text that is noted with each operation: what the program is about, as in `F, microbatch 2`.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.label = ""
        self.buffers: Buffers | None = None
        self._writer = Writer(path)
        self._reader = Reader(path, rank)
        self._main = threading.get_ident()
        self._lock = threading.RLock()
        self._sources: dict[tuple[object, int], str] = {}
        self._foreign: dict[str, bool] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._opened: Counter[str] = Counter()
        self._batch = (0, 0)
        self._batches = 0
        self._backward = -1
        self._last_of_backward = 0

    def install(self) -> None:
        """Have torch make its groups of the class that records; once, before the first group."""
        c10d.ProcessGroup = recorded_group(self, Identity.of)  # type: ignore[misc]
        opened = c10d._new_group_with_tag

        def _new_group_with_tag(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
            with self._opening(ranks, bool(options.get("use_local_synchronization"))):
                return opened(ranks, *args, **options)

        c10d._new_group_with_tag = _new_group_with_tag

    def clear(self) -> None:
        """Forget what was recorded."""
        with self._lock:
            self._writer.clear()
            self._members.clear()
            self._opened.clear()
            self.label = ""
            self.buffers = None

    def watch_buffers(self) -> None:
        """Note also whether buffers of messages keep their contents, until `clear`; it costs a pass over each."""
        self.buffers = Buffers(self._writer.flag)

    @property
    def posted(self) -> int:
        """Operations since the record was cleared; the number of the next one."""
        return int(self._writer.words[POSTED])

    @property
    def complete(self) -> bool:
        """Whether the record still holds all that was communicated since it was cleared."""
        return self.posted <= RING and not self._writer.words[LOST]

    def operations(self, since: int = 0) -> list[Operation]:
        """What this rank has communicated from operation `since` on; of too many, the last `record.RING`."""
        with self._lock:
            return self._reader.operations(since=since)

    def sequences(self) -> tuple[dict[tuple[Any, ...], int], dict[str, tuple[int, ...]]] | None:
        """How many operations of each sequence there were, and the members of their groups; None if that is lost."""
        with self._lock:
            if self._writer.words[LOST]:
                return None
            counts = {key: count for key, count in self._writer.counts().items() if key[2] != NEW_GROUP}
            return counts, dict(self._members)

    def post(self, kind: str, group: Identity, call: Call) -> int:
        """Note an operation of a group; its number."""
        name, members = group.name, group.members
        device = call.device
        writer = self._writer
        source, batch = self._source()
        with self._lock:
            if threading.get_ident() == self._main:
                self.idle()
            else:
                self._note_threads([threading.get_native_id()])
            if kind != NEW_GROUP:
                self._members[name] = members
            rank = members[call.me] if call.me >= 0 else -1
            peer = members[call.peer] if call.peer >= 0 else -1
            turn, sequence = 0, -1
            if kind in POINT_TO_POINT:
                ends = (rank, peer) if kind == SEND else (peer, rank)
                tag = call.tag if device == "cpu" else 0
                sequence, turn = writer.turn((name, device, kind, *ends, tag))
            else:
                if kind == NEW_GROUP:
                    # First which, then that: who reads the count can tell what it counts.
                    self._opened[name] += 1
                    writer.turn((name, device, NEW_GROUP, self._opened[name], *members))
                sequence, turn = writer.turn((name, device, "collective"))
            shape = call.shape[:DIMENSIONS]
            return writer.post(
                writer.text(kind),
                writer.text(call.dtype) if call.dtype else 0,
                writer.text(call.reduction) if call.reduction else 0,
                writer.text(group.text),
                writer.text(self.label) if self.label else 0,
                writer.text(source) if source else 0,
                writer.text(json.dumps(call.splits)) if call.splits else 0,
                writer.text(device),
                peer,
                call.tag,
                call.tensors,
                turn,
                sequence,
                call.bytes,
                len(shape),
                *shape,
                *(0,) * (DIMENSIONS - len(shape)),
                0,
                batch,
                time.monotonic(),
                0.0,
            )

    @contextmanager
    def waiting(self, number: int, *, completes: bool = True) -> Iterator[None]:
        """The calling thread waits for operation `number`; if it `completes`, that is so when the wait returns."""
        words = self._writer.words
        main = threading.get_ident() == self._main
        if main:
            self._note_other_threads()
            words[WAITING] = number + 1
            words[TURNS] += 1
        try:
            yield
            if completes:
                self._writer.complete(number, time.monotonic())
        finally:
            if main:
                words[WAITING] = 0
                words[TURNS] += 1

    def note_backward(self, number: int) -> None:
        """Operation `number` was posted; if that was in a backward, its end may wait for it.

        DDP's reducer waits in C++, in a callback at the end of the backward, for futures, which are no `Work`. It asks
        for that callback after its first bucket is on its way: so one of ours, asked for now, comes before it, and one
        that ours asks for comes behind it.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        self._last_of_backward = number
        if task != self._backward:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ending_backward)

    def _ending_backward(self) -> None:
        wait = ExitStack()
        wait.enter_context(self.waiting(self._last_of_backward, completes=False))
        torch.autograd.Variable._execution_engine.queue_callback(wait.close)

    def end_of_call(self) -> None:
        """The main thread is done, and posts nothing more by itself."""
        self.idle()
        self._note_other_threads()

    def idle(self) -> None:
        """The main thread waits for nothing: a backward that failed has not said so."""
        if self._writer.words[WAITING]:
            self._writer.words[WAITING] = 0
            self._writer.words[TURNS] += 1

    @contextmanager
    def _opening(self, ranks: Sequence[int] | None, local: bool) -> Iterator[None]:
        """A group of `ranks` is opened: by all ranks together, or, where `local`, by its members alone."""
        whole = c10d._get_default_group()
        everyone = dist.get_process_group_ranks(whole)
        members = everyone if ranks is None else sorted(ranks)
        mine = dist.get_rank()
        if local and mine not in members:
            yield
            return
        group = Identity.of(f"local {members}" if local else str(whole.group_name), members)
        self._members[group.name] = tuple(members if local else everyone)
        call = Call(me=members.index(mine) if mine in members else -1, device="store")
        number = self.post(NEW_GROUP, group, call)
        if mine not in members:
            yield
            return
        with self.waiting(number):
            yield

    def _note_other_threads(self) -> None:
        """Threads that Python has started: one that has not communicated yet may still be what the others wait for."""
        if threading.active_count() > 1:
            others = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
            with self._lock:
                self._note_threads([each.native_id or os.getpid() for each in others if each.ident != self._main])

    def _note_threads(self, threads: Sequence[int]) -> None:
        words = self._writer.words
        for thread in threads:
            known = list(words[OTHERS : OTHERS + THREADS])
            if thread in known:
                continue
            ended = (place for place, each in enumerate(known) if not each or not _runs(each))
            # Where there are too many, the main one, which never ends, stands for the rest.
            place, noted = next(((place, thread) for place in ended), (THREADS - 1, os.getpid()))
            words[OTHERS + place] = noted

    def _source(self) -> tuple[str, int]:
        """`file:line` of the innermost frame that is neither torch's nor ours, and the batch that the call is part of.

        gloo gets the operations of `batch_isend_irecv` one by one; only the stack tells that they are one for NCCL.
        """
        frame: FrameType | None = sys._getframe(2)
        batch = 0
        while frame is not None:
            code = frame.f_code
            foreign = self._foreign.get(code.co_filename)
            if foreign is None:
                foreign = self._foreign[code.co_filename] = _foreign(code.co_filename)
            if foreign:
                key = (code, frame.f_lineno)
                if key not in self._sources:
                    self._sources[key] = f"{_short(code.co_filename)}:{frame.f_lineno}"
                return self._sources[key], batch
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


def _runs(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}").exists()


def _foreign(file: str) -> bool:
    here = str(Path(__file__).parent)
    return not file.startswith((_TORCH, here, "<")) and not file.endswith("contextlib.py")


def _short(file: str) -> str:
    """Relative to the working directory where it lies inside."""
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
