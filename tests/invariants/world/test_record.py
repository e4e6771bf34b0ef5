"""The record of a rank: what its writer notes, a reader elsewhere finds, as long as there is room."""

import json
import threading
import time

import pytest

from invariants.communication import ANY_SOURCE, CHANGED, RECV, SEND, UNWRITTEN, Operation
from invariants.world import record
from invariants.world.record import OTHERS, RING, SEQUENCES, TEXTS, THREADS, TURNS, WAITING, Reader, Writer

GROUP = json.dumps(("world", (0, 1, 2)))


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path / "1.record")


@pytest.fixture
def reader(writer, tmp_path):
    reader = Reader(tmp_path / "1.record", 1)
    yield reader
    reader.close()


def post(writer, kind=SEND, peer=2, tag=0, shape=(2, 3), label="", posted=1.0):
    """Post as the recorder does."""
    key = ("world", "cpu", kind, 1, peer, tag) if kind == SEND else ("world", "cpu", "collective")
    sequence = writer.sequence(key)
    texts = (writer.text(kind), writer.text("float32"), 0, writer.text(GROUP), writer.text(label) if label else 0)
    rest = (0, 0, writer.text("cpu"), peer, tag, 1, sequence, 24, len(shape))
    padding = (0,) * (record.DIMENSIONS - len(shape))
    return writer.post(sequence, record.SHARED.pack(*texts, *rest, *shape, *padding), 0, posted)


def test_an_operation_is_read_as_it_was_written(writer, reader):
    sequence = writer.sequence(("world", "cuda", "collective"))
    shared = record.SHARED.pack(
        writer.text("reduce_scatter"),
        writer.text("bfloat16"),
        writer.text("sum"),
        writer.text(GROUP),
        writer.text("B, microbatch 3"),
        writer.text("train.py:7"),
        writer.text("[[3, 4]]"),
        writer.text("cuda"),
        *(-1, 2**31 - 1, 3, sequence, 2**40, 6),
        *(1 << 40, 2, 3, 4, 5, 6),
    )
    for _ in range(4):
        writer.post(sequence, shared, 8, 1.0)
    number = writer.post(sequence, shared, 9, 1.5)
    writer.complete(number, 2.5)
    assert reader.operations(last=1) == [
        Operation(
            rank=1,
            number=4,
            kind="reduce_scatter",
            group="world",
            members=(0, 1, 2),
            turn=5,
            device="cuda",
            peer=-1,
            tag=2**31 - 1,
            dtype="bfloat16",
            shape=(1 << 40, 2, 3, 4, 5, 6),
            tensors=3,
            bytes=2**40,
            reduction="sum",
            splits=((3, 4),),
            batch=9,
            label="B, microbatch 3",
            source="train.py:7",
            posted=1.5,
            completed=2.5,
        )
    ]


def test_turns_count_in_each_sequence(writer, reader):
    for tag in (0, 1, 0, 0):
        post(writer, tag=tag)
    post(writer, "all_reduce", -1)
    assert [operation.turn for operation in reader.operations()] == [1, 1, 2, 3, 1]
    assert reader.state().counts == {
        ("world", "cpu", SEND, 1, 2, 0): 3,
        ("world", "cpu", SEND, 1, 2, 1): 1,
        ("world", "cpu", "collective"): 1,
    }
    assert {operation.sequence for operation in reader.operations()} == set(reader.state().counts)


def test_the_state_tells_what_the_main_thread_waits_in(writer, reader):
    assert reader.state() == record.State(0, None, {}, (), False)
    post(writer)
    number = post(writer, tag=4)
    writer.words[WAITING] = number + 1
    writer.words[OTHERS] = 77
    state = reader.state()
    assert (state.waiting.number, state.waiting.tag, state.threads, state.lost) == (1, 4, (77,), False)
    assert reader.pulse() == (2, 2)


def test_a_state_that_changes_while_it_is_read_is_none(writer, reader, monkeypatch):
    post(writer)
    texts = reader._texts
    monkeypatch.setattr(reader, "_texts", lambda: [texts(), post(writer)][0])
    assert reader.state() is None
    monkeypatch.undo()
    assert reader.state().counts == {("world", "cpu", SEND, 1, 2, 0): 2}


def test_a_full_ring_keeps_the_latest(writer, reader):
    for number in range(RING + 5):
        assert post(writer, tag=number % 3, label=f"{number % 7}") == number
    kept = reader.operations()
    assert [operation.number for operation in kept] == list(range(5, RING + 5))
    assert all(operation.tag == operation.number % 3 for operation in kept)
    assert all(operation.label == f"{operation.number % 7}" for operation in kept)
    assert [operation.number for operation in reader.operations(last=2)] == [RING + 3, RING + 4]
    assert [operation.number for operation in reader.operations(since=RING + 4)] == [RING + 4]
    assert [operation.number for operation in reader.operations(last=9, since=RING + 4)] == [RING + 4]
    assert sum(reader.state().counts.values()) == RING + 5
    assert not reader.state().lost


def test_what_happens_to_an_operation_that_is_gone_harms_no_other(writer, reader):
    for _ in range(RING + 1):
        post(writer)
    writer.complete(0, 3.0)
    writer.flag(0, CHANGED)
    assert {(operation.completed, operation.flags) for operation in reader.operations()} == {(0.0, 0)}
    writer.words[WAITING] = 1  # it still waits in the first
    assert reader.state().waiting is None
    assert reader.state().lost


def test_flags_add_up(writer, reader):
    first, second = post(writer), post(writer)
    writer.flag(second, CHANGED)
    writer.flag(second, UNWRITTEN)
    assert [operation.flags for operation in reader.operations()] == [0, CHANGED | UNWRITTEN]
    assert first == 0


def test_a_full_table_of_texts_is_told(writer, reader):
    long = "x" * 1000
    for number in range(TEXTS // len(long) + 2):
        post(writer, label=f"{long}{number}")
    assert reader.state().lost
    labels = [operation.label for operation in reader.operations()]
    assert labels[0] == f"{long}0"
    assert labels[-1] == ""
    assert {operation.kind for operation in reader.operations()} == {SEND}  # known texts are still found
    writer.clear()
    post(writer, label="again")
    assert not reader.state().lost
    assert [operation.label for operation in reader.operations()] == ["again"]


def test_a_full_table_of_sequences_is_told(writer, reader):
    for tag in range(SEQUENCES):
        post(writer, tag=tag)
    assert not reader.state().lost
    post(writer, tag=SEQUENCES)
    post(writer, tag=0)
    state = reader.state()
    assert state.lost
    assert len(state.counts) == SEQUENCES
    assert state.counts["world", "cpu", SEND, 1, 2, 0] == 2  # those that are known go on
    assert [operation.turn for operation in reader.operations(last=2)] == [0, 2]


def test_clear_starts_anew_and_is_seen(writer, reader):
    for _ in range(3):
        post(writer, ANY_SOURCE, -1)
    writer.words[WAITING] = 3
    writer.words[OTHERS + THREADS - 1] = 5
    before = reader.pulse()
    writer.clear()
    assert reader.operations() == []
    state = reader.state()
    assert (state.waiting, state.counts, state.threads, state.lost) == (None, {}, (), False)
    assert state.turns != before[0]  # who looked before does not take it for the same
    assert post(writer) == 0
    assert [(operation.kind, operation.turn) for operation in reader.operations()] == [(SEND, 1)]
    assert reader.state().counts == {("world", "cpu", SEND, 1, 2, 0): 1}


def test_texts_of_any_length_and_script(writer, reader):
    labels = ["F, Mikrobatch 2 µ", "漢字", "e\n\0f", "y" * 70_000]
    for label in labels:
        post(writer, label=label)
    assert [operation.label for operation in reader.operations()] == labels


def test_a_copy_reads_like_the_record(writer, reader, tmp_path):
    post(writer, RECV, 0)
    (tmp_path / "copy").write_bytes(reader.copy())
    other = Reader(tmp_path / "copy", 1)
    try:
        assert other.operations() == reader.operations()
        assert other.state() == reader.state()
    finally:
        other.close()


def test_whoever_finds_a_record_can_read_it(tmp_path):
    path = tmp_path / "0.record"
    found = []

    def look():
        until = time.monotonic() + 20
        while not path.exists() and time.monotonic() < until:
            pass
        reader = Reader(path, 0)
        found.append(reader.operations())
        reader.close()

    thread = threading.Thread(target=look)
    thread.start()
    Writer(path)
    thread.join()
    assert found == [[]]
    assert [each.name for each in tmp_path.iterdir()] == ["0.record"]


def test_what_is_overwritten_while_it_is_read_is_left_out(writer, reader, monkeypatch):
    for number in range(RING):
        post(writer, tag=number)
    torn = record.ENTRY

    class Racing:
        """Reads the first half of an entry, then the writer comes around."""

        size = torn.size
        done = False

        @classmethod
        def unpack_from(cls, memory, at):
            before = torn.unpack_from(memory, at)
            if cls.done or before[0] != 1:
                return before
            cls.done = True
            monkeypatch.setattr(record, "ENTRY", torn)
            post(writer, tag=RING)
            monkeypatch.setattr(record, "ENTRY", cls)
            after = torn.unpack_from(memory, at)
            return before[:2] + after[2:]

    monkeypatch.setattr(record, "ENTRY", Racing)
    kept = reader.operations()
    monkeypatch.undo()
    assert Racing.done
    assert [operation.number for operation in kept] == list(range(1, RING))
    assert all(operation.tag == operation.number for operation in kept)


def test_entries_are_whole_while_a_writer_runs(writer, reader):
    """Each entry's fields are one number in several places."""
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            shape = (number,) * record.DIMENSIONS
            post(writer, "all_reduce", peer=number, tag=number, shape=shape, posted=float(number))
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen, until = 0, time.monotonic() + 60
        while reader.pulse()[0] < RING + 2000 and time.monotonic() < until:
            for entry in reader.operations(last=RING):
                seen += 1
                number = entry.number
                assert (entry.peer, entry.tag, entry.turn, entry.posted) == (number, number, number + 1, number)
                assert entry.shape == (number,) * record.DIMENSIONS
    finally:
        stop.set()
        thread.join()
    assert seen
    assert writer.words[TURNS] > RING
