"""`evaluate` against literal programs, against the known facts of 1F1B, and against a search of all interleavings."""

from itertools import product

import pytest

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Op, Row, parse_rows
from invariants.schedule.families import generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.order import Outcome, evaluate

GRID = list(product(range(1, 9), range(1, 9)))
TRANSPORTS = ("buffered", "blocking")


def read(*rows: str) -> tuple[Row, ...]:
    return parse_rows(row.split() for row in rows)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", LOWERINGS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_only_textbook_1f1b_deadlocks(name: str, how: str, transport: str) -> None:
    stuck = [size for size in GRID if not evaluate(lower(generate(name, *size), how), transport).finished]
    expected = [size for size in GRID if min(size) >= 2]
    assert stuck == (expected if (name, how, transport) == ("1f1b", "textbook", "blocking") else [])


def test_textbook_1f1b_names_its_cycle() -> None:
    rows = lower(generate("1f1b", 2, 2), "textbook").rows()
    assert evaluate(rows, "blocking") == Outcome(
        finished=False,
        cycle=("rank 0 waits to send 0F1 to rank 1", "rank 1 waits to send 1B0 to rank 0"),
        mismatches=(),
        last=(Action(0, Op.FORWARD, 1), Action(1, Op.BACKWARD, 0)),
    )


def test_cycle_leaves_out_ranks_that_only_wait_for_it() -> None:
    rows = read("0F0 0RECV_B0", "1F0 1SEND_F0 1RECV_B0 1SEND_B0", "2F0 2SEND_B0 2RECV_F0")
    assert evaluate(rows, "blocking").cycle == (
        "rank 1 waits to send 1F0 to rank 2",
        "rank 2 waits to send 2B0 to rank 1",
    )


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (("0F0", "1RECV_F0 1F0"), "rank 1 waits to receive 0F0 from rank 0, which has finished"),
        (("0F0 0SEND_F0", "1F0"), "rank 0 waits to send 0F0 to rank 1, which has finished"),
        (("0F0 0SEND_F0",), "rank 0 waits to send 0F0 to stage 1, which no rank computes"),
        (("0RECV_F0 0F0",), "rank 0 waits to receive -1F0 from stage -1, which no rank computes"),
        (
            ("0F0 0RECV_B0 0SEND_F0", "1RECV_F0 1F0"),
            "rank 0 waits to receive 1B0 from rank 1, which has no send left for it",
        ),
        (
            ("0F0 0SEND_F0 0SEND_F0", "1RECV_F0 1F0 1RECV_B0"),
            "rank 0 waits to send 0F0 to rank 1, which has no receive left for it",
        ),
    ],
)
def test_a_wait_for_nothing_is_said_as_such(rows: tuple[str, ...], sentence: str) -> None:
    outcome = evaluate(read(*rows), "blocking")
    assert not outcome.finished
    assert outcome.cycle == (sentence,)


def test_a_rank_that_sends_to_itself_waits_unless_both_are_posted_together() -> None:
    alone, batch = read("0F0 0SEND_F0 1RECV_F0 1F0"), read("0F0 (0SEND_F0;1RECV_F0)BATCH 1F0")
    assert evaluate(alone, "blocking").cycle == ("rank 0 waits to send 0F0 to itself",)
    assert evaluate(alone, "buffered").finished
    assert evaluate(batch, "blocking").finished


def test_swapped_messages_are_reported_though_the_run_ends() -> None:
    rows = read("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    for transport in TRANSPORTS:
        outcome = evaluate(rows, transport)
        assert outcome.finished
        assert outcome.mismatches == (
            "rank 0 sends 0F0, and rank 1 receives it as 0F1",
            "rank 0 sends 0F1, and rank 1 receives it as 0F0",
        )


def test_messages_that_were_never_exchanged_are_no_mismatch() -> None:
    rows = read("0F0 0SEND_F0 0RECV_B0", "1F0 1SEND_B0 1RECV_F1")
    assert evaluate(rows, "blocking").mismatches == ()
    assert len(evaluate(rows, "buffered").mismatches) == 1


def test_unknown_transport_and_scattered_stage_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="transport 'pigeon': expected one of buffered, blocking"):
        evaluate(read("0F0"), "pigeon")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="stage 0 computes on rank 0 and on rank 1"):
        evaluate(read("0F0", "0F1"), "blocking")
