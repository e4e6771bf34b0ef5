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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from invariants.communication import NEW_GROUP, POINT_TO_POINT, SEND, Operation
from invariants.world.buffers import Buffers
from invariants.world.callers import Callers
from invariants.world.calls import Call, Identity
from invariants.world.groups import recorded_group
from invariants.world.record import (
    DIMENSIONS,
    LOST,
    OTHERS,
    POSTED,
    RING,
    SHARED,
    THREADS,
    TURNS,
    WAITING,
    Reader,
    Writer,
)

c10d = dist.distributed_c10d
_ENGINE = str(Path("torch", "autograd", "graph.py"))
ENTRIES = 4096
"""Of operations that are told alike, how many ways are remembered."""


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
        self._callers = Callers(Path(torch.__file__).parent)
        self._members: dict[str, tuple[int, ...]] = {}
        self._opened: Counter[str] = Counter()
        self._entries: dict[tuple[str, str, Call, str, str], tuple[int, bytes]] = {}
        self._whole: Any = None
        self._backward = -1
        self._last_of_backward = 0

    def install(self) -> None:
        """Have torch make its groups of the class that records; once, before the first group."""
        c10d.ProcessGroup = recorded_group(self)  # type: ignore[misc]
        opened = c10d._new_group_with_tag

        def _new_group_with_tag(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
            with self._opening(ranks, bool(options.get("use_local_synchronization"))):
                return opened(ranks, *args, **options)

        c10d._new_group_with_tag = _new_group_with_tag
        started = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            started(thread)
            if thread.native_id is not None:
                with self._lock:
                    self._note_threads([thread.native_id])

        threading.Thread.start = start  # type: ignore[method-assign, assignment]
        os.register_at_fork(after_in_child=self._detach)

    def _detach(self) -> None:
        """In a child that the program has forked: what it communicates is not this rank's."""
        self._lock = threading.RLock()
        self._entries.clear()
        self._writer.detach()

    def joined(self) -> None:
        """The default group is there: the world is known by it."""
        self._whole = dist.group.WORLD

    @property
    def same_world(self) -> bool:
        """Whether the default group is still the one that `joined` found: ranks of another have other numbers."""
        return dist.group.WORLD is self._whole

    def beware(self) -> None:
        """Something may communicate that is no thread yet: until `clear` this rank is never taken for stuck."""
        with self._lock:
            self._note_threads([os.getpid()])  # the main thread, which runs as long as the rank does

    def give_up(self) -> None:
        """Something cannot be recorded: nothing is proved from what can."""
        self._writer.words[LOST] = 1

    def clear(self) -> None:
        """Forget what was recorded."""
        with self._lock:
            self._writer.clear()
            self._members.clear()
            self._opened.clear()
            self._entries.clear()
            self.label = ""
            self.buffers = None
            # Those that start later are noted when they do. One that has not communicated may be what others wait for.
            others = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
            self._note_threads([each.native_id or os.getpid() for each in others if each.ident != self._main])

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
        source, batch = self._callers.of_operation()
        with self._lock:
            if threading.get_ident() == self._main:
                self.idle()
            else:
                self._note_threads([threading.get_native_id()])
            if not self.same_world:
                self.give_up()
            told = kind, group.text, call, self.label, source
            entry = self._entries.get(told) or self._entry(told, group)
            return self._writer.post(*entry, batch, time.monotonic())

    def _entry(self, told: tuple[str, str, Call, str, str], group: Identity) -> tuple[int, bytes]:
        """The sequence of operations that are `told` alike, and what they share in the record."""
        kind, _, call, label, source = told
        writer, name, members = self._writer, group.name, group.members
        peer = members[call.peer] if call.peer >= 0 else -1
        key: tuple[Any, ...] = name, call.device, "collective"
        if kind in POINT_TO_POINT:
            ends = (group.rank, peer) if kind == SEND else (peer, group.rank)
            key = name, call.device, kind, *ends, call.tag if call.device == "cpu" else 0
        if kind != NEW_GROUP:
            self._members[name] = members
        splits = json.dumps(call.splits) if call.splits else ""
        texts = kind, call.dtype, call.reduction, group.text, label, source, splits, call.device
        numbers = [writer.text(text, vital=text not in (label, source)) if text else 0 for text in texts]
        sequence = writer.sequence(key)
        shape = call.shape[:DIMENSIONS]
        sizes = len(shape), *shape, *(0,) * (DIMENSIONS - len(shape))
        shared = SHARED.pack(*numbers, peer, call.tag, call.tensors, sequence, call.bytes, *sizes)
        if len(self._entries) >= ENTRIES:
            self._entries.clear()
        self._entries[told] = sequence, shared
        return sequence, shared

    def withdraw(self, number: int) -> None:
        """The backend has refused operation `number` with an error: it never was."""
        with self._lock:
            self._writer.withdraw(number)

    def begin_wait(self, number: int) -> None:
        """The calling thread waits for operation `number`."""
        if threading.get_ident() == self._main:
            words = self._writer.words
            words[WAITING] = number + 1
            words[TURNS] += 1

    def end_wait(self, number: int, *, completes: bool) -> None:
        """The wait is over; `completes`: and so is the operation."""
        if completes:
            self.note_completion(number)
        if threading.get_ident() == self._main:
            words = self._writer.words
            words[WAITING] = 0
            words[TURNS] += 1

    def note_completion(self, number: int) -> None:
        """Operation `number` is complete."""
        self._writer.complete(number, time.monotonic())

    def note_backward(self, number: int) -> None:
        """Operation `number` was posted; if that was in a backward, its end may wait for it.

        DDP's reducer waits in C++, in a callback at the end of the backward, for futures, which are no `Work`. It asks
        for that callback after its first bucket is on its way: so one of ours, asked for now, comes before it, and one
        that ours asks for comes behind it.
        """
        task = torch._C._current_graph_task_id()
        # Asked for by Python, it is waited for by its handle: the reducer's has no Python of its own on the stack.
        if task == -1 or not sys._getframe(2).f_code.co_filename.endswith(_ENGINE):
            return
        self._last_of_backward = number
        if task != self._backward:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ending_backward)

    def _ending_backward(self) -> None:
        number = self._last_of_backward
        self.begin_wait(number)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end_wait(number, completes=False))

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
        call = Call(device="store")
        with self._lock:
            # First which, then that: who reads the count can tell what it counts.
            self._opened[group.name] += 1
            key = group.name, "store", NEW_GROUP, self._opened[group.name], *members
            self._writer.count(self._writer.sequence(key))
        number = self.post(NEW_GROUP, group, call)
        if mine not in members:
            yield
            return
        self.begin_wait(number)
        completes = False
        try:
            yield
            completes = True
        finally:
            self.end_wait(number, completes=completes)

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


def _runs(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}").exists()
