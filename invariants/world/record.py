"""The memory that a rank writes its communication to and the controller reads, while the rank is stuck or dead.

A file in the world's private folder, mapped by both: it needs no lock, outlives the rank and goes with the folder. It
holds a header of 64-bit words, a table of sequences with their counts, a table of texts, and a ring of operations.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invariants.communication import NEW_GROUP, SEND, Operation

RING = 1 << 14
"""Operations that are kept; older ones are overwritten."""
SEQUENCES = 1 << 13
TEXTS = 1 << 20
"""Bytes of all texts: names of groups, files, labels."""
THREADS = 16
DIMENSIONS = 6

# Words of the header.
POSTED, TURNS, WAITING, TEXT_BYTES, USED, LOST, OTHERS = range(7)
HEADER = (7 + THREADS) * 8

SHARED = struct.Struct("<8I3iqQi6q")
"""What operations have in common that are told alike: texts kind, dtype, reduction, group, label, source, splits,
device; peer, tag, tensors; sequence, bytes; number of dimensions, up to `DIMENSIONS` of them."""
ENTRY = struct.Struct(f"<qq{SHARED.size}s2idd")
"""number plus 1; turn; what is shared; flags, batch; posted, completed."""
_COMPLETED = ENTRY.size - 8
_FLAGS = ENTRY.size - 24
_SEQUENCE = 11
"""Place of the sequence in `SHARED`."""
_COUNTS = HEADER
_KEYS = _COUNTS + 8 * SEQUENCES
_TEXTS = _KEYS + 8 * SEQUENCES
_RING = _TEXTS + TEXTS
SIZE = _RING + RING * ENTRY.size
_TIME = struct.Struct("<d")
_FLAG = struct.Struct("<i")
_NUMBER = struct.Struct("<q")
_LENGTH = struct.Struct("<I")


class Writer:
    """The rank's side. Not for several threads at once: the recorder holds its lock."""

    def __init__(self, path: Path) -> None:
        made = path.with_suffix(".new")
        with made.open("w+b") as file:
            os.ftruncate(file.fileno(), SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        made.rename(path)  # who finds it finds all of it
        self._look()
        self._texts: dict[str, int] = {}
        self._sequences: dict[tuple[Any, ...], int] = {}

    def _look(self) -> None:
        view = memoryview(self._map)
        self.words = view[:HEADER].cast("q")
        self._counts = view[_COUNTS:_KEYS].cast("q")
        self._keys = view[_KEYS:_TEXTS].cast("q")

    def detach(self) -> None:
        """Write to memory of this process alone from now on: it is a child of the rank, and not the rank."""
        self._map = mmap.mmap(-1, SIZE)
        self._look()
        self._texts.clear()
        self._sequences.clear()

    def clear(self) -> None:
        """Forget all operations; they are numbered from 0 again."""
        used = self.words[USED]
        for word in (POSTED, WAITING, TEXT_BYTES, USED, LOST, *range(OTHERS, OTHERS + THREADS)):
            self.words[word] = 0
        for sequence in range(used):
            self._counts[sequence] = 0
        self._texts.clear()
        self._sequences.clear()
        self.words[TURNS] += 1

    def text(self, text: str, *, vital: bool = True) -> int:
        """The number of `text` in the table; 0 where it is full, or nearly so and the text not `vital`."""
        number = self._texts.get(text)
        if number is None:
            data = text.encode()
            used = self.words[TEXT_BYTES]
            if used + len(data) + 4 > (TEXTS if vital else TEXTS // 2):
                if vital:
                    self.words[LOST] = 1
                return 0
            at = _TEXTS + used
            self._map[at + 4 : at + 4 + len(data)] = data
            _LENGTH.pack_into(self._map, at, len(data))
            number = self._texts[text] = len(self._texts) + 1
            self.words[TEXT_BYTES] = used + 4 + len(data)
        return number

    def sequence(self, key: tuple[Any, ...]) -> int:
        """The number of a sequence, see `Operation.sequence`; -1 where the table is full."""
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self.words[USED]
            if sequence == SEQUENCES:
                self.words[LOST] = 1
                return -1
            self._keys[sequence] = self.text(json.dumps(key))
            self._counts[sequence] = 0
            self._sequences[key] = sequence
            self.words[USED] = sequence + 1
        return sequence

    def count(self, sequence: int) -> int:
        """The place of the next operation in a sequence, from 1; 0 where that is lost."""
        if sequence < 0:
            return 0
        self._counts[sequence] = turn = self._counts[sequence] + 1
        return turn

    def counts(self) -> dict[tuple[Any, ...], int]:
        """Operations by sequence."""
        return {key: self._counts[sequence] for key, sequence in self._sequences.items()}

    def post(self, sequence: int, shared: bytes, batch: int, posted: float) -> int:
        """Append the next operation of a sequence, with `SHARED` packed; its number."""
        words = self.words
        number, turn = words[POSTED], self.count(sequence)
        at = _RING + number % RING * ENTRY.size
        ENTRY.pack_into(self._map, at, number + 1, turn, shared, 0, batch, posted, 0.0)
        words[POSTED] = number + 1
        words[TURNS] += 1
        return number

    def withdraw(self, number: int) -> None:
        """Take back operation `number`: the backend refused it."""
        words = self.words
        at = _RING + number % RING * ENTRY.size
        sequence = SHARED.unpack(ENTRY.unpack_from(self._map, at)[2])[_SEQUENCE]
        if sequence >= 0:
            self._counts[sequence] -= 1
        _NUMBER.pack_into(self._map, at, 0)
        if words[POSTED] == number + 1:
            words[POSTED] = number
        words[TURNS] += 1

    def flag(self, number: int, flag: int) -> None:
        """Add to the flags of operation `number`."""
        if number > self.words[POSTED] - RING:
            at = _RING + number % RING * ENTRY.size + _FLAGS
            _FLAG.pack_into(self._map, at, _FLAG.unpack_from(self._map, at)[0] | flag)

    def complete(self, number: int, now: float) -> None:
        """Note that a wait for operation `number` has returned."""
        if number > self.words[POSTED] - RING:
            _TIME.pack_into(self._map, _RING + number % RING * ENTRY.size + _COMPLETED, now)


@dataclass(frozen=True)
class State:
    """A rank's record at one moment, as far as the question of who waits for whom goes."""

    turns: int
    """Rises with each operation posted, and each wait begun or ended."""
    waiting: Operation | None
    """What the main thread waits in."""
    counts: dict[tuple[Any, ...], int]
    """Operations posted by sequence, see `Operation.sequence`; and 1 for each group opened, see `opening`."""
    threads: tuple[int, ...]
    """Native ids of other threads that have communicated, or were there when the main thread began to wait."""
    lost: bool
    """Whether the record is incomplete."""


class Reader:
    """The controller's side."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
        self._words = memoryview(self._map)[:HEADER].cast("q")
        self._rank = rank

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._map.close()

    def copy(self) -> bytes:
        """All of the record, for a `Reader` elsewhere; not one state, if the pulse has changed meanwhile."""
        return bytes(self._map)

    def pulse(self) -> tuple[int, int]:
        """`State.turns`, and the number of the operation that the main thread waits in plus 1, or 0."""
        return self._words[TURNS], self._words[WAITING]

    def state(self) -> State | None:
        """The state, or None where the rank went on while it was read."""
        turns, waiting = self.pulse()
        texts = self._texts()
        counts: dict[tuple[Any, ...], int] = {}
        for sequence in range(self._words[USED]):
            (count,) = struct.unpack_from("<q", self._map, _COUNTS + 8 * sequence)
            (key,) = struct.unpack_from("<q", self._map, _KEYS + 8 * sequence)
            if 0 < key <= len(texts):
                counts[tuple(json.loads(texts[key - 1]))] = count
        operation = self._entry(waiting - 1, texts) if waiting else None
        threads = tuple(word for word in self._words[OTHERS : OTHERS + THREADS] if word)
        lost = bool(self._words[LOST]) or (waiting > 0 and operation is None)
        if self.pulse() != (turns, waiting):
            return None
        return State(turns, operation, counts, threads, lost)

    def operations(self, last: int | None = None, since: int = 0) -> list[Operation]:
        """The operations from number `since` on that are still in the ring, or the `last` of them."""
        posted = self._words[POSTED]
        first = max(since, posted - RING, 0 if last is None else posted - last)
        texts = self._texts()
        entries = (self._entry(number, texts) for number in range(first, posted))
        return [entry for entry in entries if entry is not None]

    def _texts(self) -> list[str]:
        texts, at, end = [], _TEXTS, _TEXTS + self._words[TEXT_BYTES]
        while at < end:
            (length,) = _LENGTH.unpack_from(self._map, at)
            texts.append(self._map[at + 4 : at + 4 + length].decode(errors="replace"))
            at += 4 + length
        return texts

    def _entry(self, number: int, texts: list[str]) -> Operation | None:
        at = _RING + number % RING * ENTRY.size
        found, turn, shared, flags, batch, posted, completed = ENTRY.unpack_from(self._map, at)
        (still,) = _NUMBER.unpack_from(self._map, at)
        if not found == still == number + 1:
            return None  # overwritten meanwhile
        *numbers, peer, tag, tensors, _, size, dimensions = SHARED.unpack(shared)[:-DIMENSIONS]
        shape = SHARED.unpack(shared)[-DIMENSIONS:]
        kind, dtype, reduction, group, label, source, splits, device = (
            texts[text - 1] if 0 < text <= len(texts) else "" for text in numbers
        )
        name, members = json.loads(group) if group else ("", ())
        return Operation(
            rank=self._rank,
            number=number,
            kind=kind,
            group=name,
            members=tuple(members),
            turn=turn,
            device=device,
            peer=peer,
            tag=tag,
            dtype=dtype,
            shape=shape[:dimensions],
            tensors=tensors,
            bytes=size,
            reduction=reduction,
            splits=tuple(tuple(part) for part in json.loads(splits)) if splits else (),
            label=label,
            source=source,
            flags=flags,
            batch=batch,
            posted=posted,
            completed=completed,
        )


def opening(operation: Operation) -> tuple[Any, ...]:
    """What a rank counts besides the sequence when it opens a group: that its `turn`-th has these members.

    torch numbers groups in the order in which they are opened: a group is the same on its members if its number is.
    """
    return operation.group, operation.device, NEW_GROUP, operation.turn, *operation.members


def answering(operation: Operation) -> tuple[Any, ...]:
    """The sequence of the other side of a message."""
    group, device, kind, sender, receiver, tag = operation.sequence
    return group, device, "recv" if kind == SEND else SEND, sender, receiver, tag
