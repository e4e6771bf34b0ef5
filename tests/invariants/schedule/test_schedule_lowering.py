"""What each lowering adds, that it costs no time, and what it refuses."""

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Batch, Op, actions_of, parse_rows
from invariants.schedule.completeness import complete
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import ALONE, FIRST, Schedule, as_schedule
from invariants.schedule.text import format_csv, parse_csv
from invariants.schedule.timeline import simulate
from invariants.schedule.transports import TRANSPORTS

BETWEEN = [how for how in LOWERINGS if how != "in-order"]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Computation of any family, small."""
    name = draw(st.sampled_from(list(FAMILIES)))
    ranks, virtual = draw(st.integers(1, 4)), FAMILIES[name].virtual or draw(st.integers(1, 3))
    least = max(1, FAMILIES[name].least * ranks)
    return generate(name, ranks, draw(st.integers(least, least + 6)), virtual)


SIZES = {"stages": st.integers(1, 8), "microbatches": st.integers(1, 12)}
COST = st.sampled_from([Fraction(1), Fraction(2), Fraction(0), Fraction(1, 3), Fraction(7)])


def texts(rows):
    return [" ".join(map(str, row)) for row in as_schedule(rows).rows()]


def without_messages(rows):
    return tuple(tuple(cell for cell in row if not isinstance(cell, Batch) and cell.op.computes) for row in rows)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "receive-first",
            [
                "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
            ],
        ),
        (
            "textbook",
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
            ],
        ),
        (
            "even-first",
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
            ],
        ),
        (
            "batched",
            [
                "0F0 0SEND_F0 0F1 (0SEND_F1;0RECV_B0)BATCH 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 (1SEND_B0;1RECV_F1)BATCH 1F1 1B1 1SEND_B1",
            ],
        ),
    ],
)
def test_1f1b_literally(how, expected):
    assert texts(lower(generate("1f1b", 2, 2), how)) == expected


def test_gpipe_is_lowered_in_one_way_only():
    for stages in range(1, 6):
        for microbatches in range(1, 6):
            rows = generate("gpipe", stages, microbatches)
            assert len({lower(rows, how).rows() for how in BETWEEN}) == 1


def test_fewer_microbatches_than_stages_are_sent_before_the_gradient_is_awaited():
    assert texts(lower(generate("1f1b", 3, 1), "receive-first")) == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0 2F0 2B0 2SEND_B0",
    ]


@pytest.mark.parametrize("how", LOWERINGS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(**SIZES)
def test_a_lowering_is_complete_and_keeps_the_computation(name, how, stages, microbatches):
    rows = generate(name, stages, microbatches)
    lowered = lower(rows, how)
    assert complete(lowered, stages, microbatches) == []
    assert without_messages(lowered.rows()) == rows.rows()
    assert evaluate(lowered, "buffered").mismatches == ()


def rendezvous_makespan(rows, forward, backward):
    """Time under blocking sends: a message passes when both sides are there, a batch when all its partners are."""
    sides = defaultdict(list)
    for rank, row in enumerate(rows):
        for column, cell in enumerate(row):
            for action in actions_of(cell):
                if not action.op.computes:
                    ends = (rank, action.peer) if action.op.sends else (action.peer, rank)
                    sides[(*ends, action.op.sends)].append((rank, column))
    partners = defaultdict(list)
    for source, destination, is_send in list(sides):
        pairs = zip(sides[source, destination, True], sides[source, destination, False], strict=True)
        for send, receive in pairs if is_send else ():
            partners[send].append(receive)
            partners[receive].append(send)
    arrived = [[Fraction()] for _ in rows]
    for _ in range(sum(map(len, rows))):
        for rank, row in enumerate(rows):
            here = len(arrived[rank]) - 1
            others = partners[rank, here]
            if here == len(row) or any(len(arrived[other]) <= column for other, column in others):
                continue
            time = max([arrived[rank][here], *(arrived[other][column] for other, column in others)])
            for action in actions_of(row[here]):
                if action.op.computes:
                    time += (forward if action.op is Op.FORWARD else backward)[action.stage]
            arrived[rank].append(time)
    assert [len(times) - 1 for times in arrived] == [len(row) for row in rows]
    return max(times[-1] for times in arrived)


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("gpipe", "1f1b") for how in BETWEEN if (name, how) != ("1f1b", "textbook")],
)
@given(data=st.data(), **SIZES)
def test_blocking_sends_cost_no_time(name, how, data, stages, microbatches):
    rows = generate(name, stages, microbatches)
    forward, backward = (data.draw(st.lists(COST, min_size=stages, max_size=stages)) for _ in range(2))
    makespan = simulate(rows, Costs(forward, backward, 0)).makespan
    assert rendezvous_makespan(lower(rows, how).rows(), forward, backward) == makespan


@pytest.mark.parametrize("how", LOWERINGS)
def test_stages_of_one_rank_exchange_nothing(how):
    rows = parse_rows([["0F0", "1F0", "3F0", "3B0", "1B0", "0B0"], ["2F0", "2B0"]])
    assert texts(lower(rows, how)) == [
        "0F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1B0 0B0",
        "2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0",
    ]


def test_a_split_backward_sends_the_input_gradient_at_once():
    rows = parse_rows([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])
    assert texts(lower(rows, "textbook")) == [
        "0F0 0SEND_F0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]


def test_what_cannot_be_lowered_is_refused():
    with pytest.raises(UsageError, match="'carrier': expected one of receive-first, textbook, even-first, batched"):
        lower(generate("gpipe", 2, 2), "carrier")
    with pytest.raises(UsageError, match="1RECV_F0 at rank 1, column 0: expected computation only"):
        lower(parse_rows([["0F0"], ["1RECV_F0", "1F0"]]), "textbook")
    with pytest.raises(UsageError, match="stage 0 computes on rank 0 and on rank 1"):
        lower(parse_rows([["0F0"], ["0B0"]]), "textbook")


@pytest.mark.parametrize("how", BETWEEN)
@given(schedules())
def test_placing_by_counting_is_placing_by_sorting(how, schedule):
    """Any mark of a compound cell takes the general way; where each compound has one member the cells are the same."""
    marked = Schedule(*schedule.columns[:-1], np.where(schedule.joint == ALONE, FIRST, schedule.joint).astype(np.uint8))
    plain, sorted_ = lower(schedule, how), lower(marked, how)
    assert all(
        np.array_equal(left, right) for left, right in zip(plain.columns[:-1], sorted_.columns[:-1], strict=True)
    )


@pytest.mark.parametrize("how", LOWERINGS)
@given(schedules())
def test_empty_cells_change_nothing(how, schedule):
    """torch's own files have one for each step at which a rank idles."""
    rows = [row.split(",") for row in format_csv(schedule).splitlines()]
    parted = parse_csv("\n".join(",,".join(row) for row in rows), "parted")
    assert len(parted) > len(schedule) or len(schedule) == schedule.ranks
    assert lower(parted, how) == lower(schedule, how)


@given(schedules(), st.sampled_from([*TRANSPORTS, "buffered(1)"]))
def test_in_order_ends_on_every_transport(schedule, transport):
    outcome = evaluate(lower(schedule, "in-order"), transport)
    assert (outcome.finished, outcome.mismatches) == (True, ())


@given(schedules(), st.sampled_from(list(LOWERINGS)))
def test_every_message_is_sent_once_and_received_once(schedule, how):
    lowered = lower(schedule, how)
    assert complete(lowered, schedule.stages, schedule.microbatches) == []
    kept = lowered.computes
    assert lowered.op[kept].tolist() == schedule.op.tolist()
    assert lowered.microbatch[kept].tolist() == schedule.microbatch.tolist()


def test_an_order_that_never_ends_has_no_common_order_of_messages():
    with pytest.raises(UsageError, match=r"lowering in-order: .*expected an order of computation that ends"):
        lower(parse_rows([["0B0", "0F0"], ["1F0", "1B0"]]), "in-order")
