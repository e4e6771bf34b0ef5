"""The CSV form: kept byte for byte where torch wrote it, refused by its place where it is not exact."""

import csv
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Batch, Op, Overlap, parse_cell, parse_rows
from invariants.schedule.convert import of_actions, of_torch
from invariants.schedule.table import IDLE
from invariants.schedule.text import format_csv, parse_csv, read_csv

STAGES, MICROBATCHES = st.integers(0, 200), st.one_of(st.integers(0, 12), st.integers(0, 10**6))
COMPUTATIONS = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.computes]), MICROBATCHES)
MESSAGES = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.exchanges]), MICROBATCHES)
SHARDS = st.builds(Action, STAGES, st.sampled_from([op for op in Op if op.shards]))
OVERLAPS = st.builds(Overlap, st.lists(COMPUTATIONS, min_size=1, max_size=3).map(tuple))
BATCHES = st.builds(Batch, st.lists(MESSAGES, min_size=1, max_size=3).map(tuple))
THEIR_CELLS = st.one_of(st.just(""), st.one_of(COMPUTATIONS, MESSAGES, SHARDS, OVERLAPS).map(str))
CELLS = THEIR_CELLS | BATCHES.map(str)
ROWS = st.lists(st.lists(CELLS, max_size=6), min_size=1, max_size=4)
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def written(rows):
    """As `csv` writes rows, which is how torch does."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue()


def cell_by_cell(text):
    """The slow way: what `text` is in torch's own writing, and the problem of its first wrong cell."""
    rows = [line.removesuffix("\r").split(",") for line in text.removesuffix("\n").split("\n")]
    known = [[cell.strip(" \t") for cell in row] if row != [""] else [] for row in rows]
    try:
        kept = [["" if cell in ("", '""') else str(parse_cell(cell)) for cell in row] for row in known]
    except UsageError as error:
        return None, str(error).partition(": ")[2]
    return written(kept), None


@given(rows=ROWS)
def test_a_round_trip_keeps_the_text(rows):
    text = written(rows)
    schedule = parse_csv(text, "rows")
    assert format_csv(schedule) == text
    assert schedule.rows() == parse_rows([[cell for cell in row if cell] for row in rows])
    assert (schedule.op == IDLE).sum() == sum(cell == "" for row in rows for cell in row)
    assert all(column.flags.c_contiguous for column in (schedule.op, schedule.stage, schedule.microbatch))


@given(text=st.text('0123FBIW_SENDRCV();"HARU \t,\r\n', min_size=1, max_size=30) | ROWS.map(written))
def test_any_text_is_read_as_cell_by_cell(text):
    expected, problem = cell_by_cell(text)
    if problem is None:
        assert format_csv(parse_csv(text, "rows")) == expected
    else:
        with pytest.raises(UsageError) as refused:
            parse_csv(text, "rows")
        assert str(refused.value).endswith(problem)


@given(rows=ROWS, data=st.data())
def test_a_changed_character_is_read_as_cell_by_cell(rows, data):
    text = written(rows)
    at = data.draw(st.integers(0, len(text) - 1))
    test_any_text_is_read_as_cell_by_cell.hypothesis.inner_test(
        text[:at] + data.draw(st.sampled_from("x0F;,(")) + text[at + 1 :]
    )


@given(rows=st.lists(st.lists(THEIR_CELLS, max_size=6), min_size=1, max_size=4))
def test_torch_reads_what_we_write(rows):
    schedule = parse_csv(written(rows), "rows")
    theirs = csv.reader(io.StringIO(format_csv(schedule), newline=""))
    assert of_actions([[torch_schedules._Action.from_str(cell) for cell in row] for row in theirs]) == schedule


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("name", MULTI)
def test_what_torch_dumps_is_kept_and_is_what_it_holds(torch_schedule, tmp_path, name, lowered):
    for ranks, microbatches in ((1, 2), (2, 4), (3, 6), (4, 12)):
        live = torch_schedule(f"Schedule{name}", ranks, microbatches)
        live._dump_csv(tmp_path / "dump.csv", format="compute_comms" if lowered else "compute_only")
        schedule = read_csv(tmp_path / "dump.csv")
        assert format_csv(schedule).encode() == (tmp_path / "dump.csv").read_bytes()
        assert schedule == of_torch(live, lowered=lowered)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("0F0,0B0\n1F0\n", "0F0,0B0\r\n1F0\r\n"),
        ("0F0\r\n1F0", "0F0\r\n1F0\r\n"),
        (" 0F0 ,\t0B0,,\n", "0F0,0B0,,\r\n"),
        ("( 0F1 ; 0B0 )OVERLAP_F_B\n", "(0F1;0B0)OVERLAP_F_B\r\n"),
        ('0F0,"",0B0\n', "0F0,,0B0\r\n"),
        ("\n", "\r\n"),
        (" \n", '""\r\n'),
        ("0F0\r\n\r\n2F0\r\n\r\n", "0F0\r\n\r\n2F0\r\n\r\n"),
    ],
)
def test_what_else_is_read(text, kept):
    assert format_csv(parse_csv(text, "text")) == kept


@pytest.mark.parametrize(
    ("cell", "allowed"),
    [
        ("0F0junk", r"expected {stage}{op}{microbatch} with op one of F, I, W, B, SEND_F, RECV_F"),
        ("0F", "expected a microbatch after F"),
        ("0UNSHARD1", "expected no microbatch after UNSHARD"),
        ("(0F0;0SEND_F0)OVERLAP_F_B", "an OVERLAP_F_B holds computations only"),
        ("(0F0;0B0)BATCH", "a BATCH holds sends and receives only"),
        ("0F2147483648", "expected numbers up to 2147483647"),
        ("99999999999999999999F0", "expected numbers up to 2147483647"),
        pytest.param("0F" + "9" * 5000, "expected numbers up to 2147483647", id="5000 digits"),
        *[(cell, "expected {stage}") for cell in ("00F0", "0F00", "-1F0", "0f0", "F0", "0X0", "0 F0", "0F0;0B0")],
        *[(cell, "expected {stage}") for cell in ("(0F0;0B0)", "()OVERLAP_F_B", "-1OVERLAP_F_B", '"0F0"', "\ufeff0F0")],
        *[(cell, "expected {stage}") for cell in ("\u0663F0", "0F\u00b2", "0F0\r", "0F0\x0b", "0F0\u2028", "0F0\xa0")],
    ],
)
def test_a_wrong_cell_is_named_by_its_place(cell, allowed):
    text = f"0F0,0B0\r\n\r\n,2F0,{cell},2B0\r\n"
    with pytest.raises(UsageError) as error:
        parse_csv(text, "mine.csv")
    expected = f"mine.csv, row 3 of 3 (rank 2), column 3 of 4: schedule cell {cell!r}: "
    assert str(error.value).startswith(expected)
    assert allowed in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_with_gaps_are_refused_by_the_name_of_their_file():
    with pytest.raises(UsageError, match=r"^mine\.csv: .*1000000000 stages"):
        parse_csv("999999999F0,0F1000\n", "mine.csv")
    assert parse_csv("0F200000000\n", "mine.csv").microbatches == 200000001


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty: expected one row a rank"),
        (b"0F0\n1F0,\xff\n", "row 2: byte 0xff is not UTF-8"),
        (b"0F0\n1F0,1Q0\n", r"row 2 of 2 \(rank 1\), column 2 of 2: schedule cell '1Q0'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, content, message):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^{path}.*{message}"):
        read_csv(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, reason in ((tmp_path / "none.csv", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=rf"^{path}: {reason}.*: expected a schedule as a CSV file"):
            read_csv(path)


def test_many_cells_are_read_as_arrays():
    ranks, microbatches = 64, 1024
    rows = [[f"{rank}{op}{i}" for i in range(microbatches) for op in ("F", "B")] for rank in range(ranks)]
    schedule = parse_csv(written(rows), "text")
    assert np.array_equal(schedule.stage, np.repeat(np.arange(ranks), 2 * microbatches))
    assert np.array_equal(schedule.microbatch, np.tile(np.repeat(np.arange(microbatches), 2), ranks))
    assert format_csv(schedule) == written(rows)
