"""`evaluate` against literal programs, against the known facts of 1F1B, and against a search of all interleavings."""

import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Batch, Op, Row, actions_of, parse_rows
from invariants.schedule.families import generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.order import Outcome, evaluate

GRID = list(product(range(1, 9), range(1, 9)))
TRANSPORTS = ("buffered", "blocking")


def read(*rows: str) -> tuple[Row, ...]:
    return parse_rows(row.split() for row in rows)


class Operation(NamedTuple):
    action: Action
    source: int
    destination: int
    rank: int
    column: int


class State(NamedTuple):
    columns: tuple[int, ...]
    posted: tuple[bool, ...]
    open: frozenset[int]
    swaps: int


class Explorer:
    """The slow, obviously right way: every interleaving, one small step at a time.

    A step posts a rank's cell, lets the oldest send and the oldest receive of two ranks meet, or takes a rank to its
    next cell. Operations are numbered in program order. Computation is passed over: nothing waits for it.
    """

    def __init__(self, rows: tuple[Row, ...], transport: str) -> None:
        self.buffered = transport == "buffered"
        homes = {cell.stage: rank for rank, row in enumerate(rows) for cell in row if computes(cell)}
        self.operations: list[Operation] = []
        self.cells: list[list[list[int]]] = []
        for rank, row in enumerate(rows):
            self.cells.append([])
            for column, cell in enumerate(row):
                if not computes(cell):
                    first = len(self.operations)
                    for action in actions_of(cell):
                        peer = homes.get(action.stage + (1 if action.op in (Op.SEND_F, Op.RECV_B) else -1), -1)
                        ends = (rank, peer) if sends(action) else (peer, rank)
                        self.operations.append(Operation(action, *ends, rank, column))
                    self.cells[-1].append(list(range(first, len(self.operations))))

    def ends(self) -> set[State]:
        """Where a run can come to rest."""
        ranks = len(self.cells)
        start = State((0,) * ranks, (False,) * ranks, frozenset(), 0)
        seen, todo, ends = {start}, [start], set()
        while todo:
            state = todo.pop()
            following = {*self.posts(state), *self.meetings(state), *self.advances(state)}
            if not following:
                ends.add(state)
            todo += following - seen
            seen |= following
        return ends

    def here(self, state: State, rank: int) -> list[int] | None:
        """Operations of the cell that `rank` is at; None at its end."""
        column = state.columns[rank]
        return self.cells[rank][column] if column < len(self.cells[rank]) else None

    def posts(self, state: State) -> Iterator[State]:
        for rank, posted in enumerate(state.posted):
            cell = self.here(state, rank)
            if cell is not None and not posted:
                yield state._replace(posted=put(state.posted, rank, True), open=state.open | frozenset(cell))

    def meetings(self, state: State) -> Iterator[State]:
        oldest: dict[tuple[int, int, bool], int] = {}
        for number in sorted(state.open, reverse=True):
            action, source, destination, *_ = self.operations[number]
            oldest[source, destination, sends(action)] = number
        for (source, destination, is_send), number in oldest.items():
            partner = oldest.get((source, destination, False))
            if is_send and partner is not None:
                swaps = state.swaps + (
                    not same_message(self.operations[number].action, self.operations[partner].action)
                )
                yield state._replace(open=state.open - {number, partner}, swaps=swaps)

    def advances(self, state: State) -> Iterator[State]:
        for rank, posted in enumerate(state.posted):
            if posted:
                waits = state.open.intersection(self.here(state, rank) or ())
                if not any(not self.buffered or not sends(self.operations[number].action) for number in waits):
                    columns = put(state.columns, rank, state.columns[rank] + 1)
                    yield state._replace(columns=columns, posted=put(state.posted, rank, False))


def put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def computes(cell: Action | Batch) -> bool:
    return isinstance(cell, Action) and cell.op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)


def sends(action: Action) -> bool:
    return action.op in (Op.SEND_F, Op.SEND_B)


def same_message(send: Action, receive: Action) -> bool:
    fits = {Op.RECV_F: (Op.SEND_F, receive.stage - 1), Op.RECV_B: (Op.SEND_B, receive.stage + 1)}
    return fits[receive.op] == (send.op, send.stage) and send.microbatch == receive.microbatch


@st.composite
def right_rows(draw: st.DrawFn) -> tuple[Row, ...]:
    """Lowered rows of a family, or of any order that data allows, with up to two stages a rank."""
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    how = draw(st.sampled_from(list(LOWERINGS)))
    if draw(st.booleans()):
        return lower(generate(draw(st.sampled_from(["gpipe", "1f1b"])), ranks, microbatches), how).rows()
    stages = draw(st.integers(ranks, ranks + 1))
    progress = dict.fromkeys(range(microbatches), 0)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for microbatch in draw(st.permutations(sorted([*progress] * 2 * stages))):
        done = progress[microbatch]
        stage, op = (done, Op.FORWARD) if done < stages else (2 * stages - 1 - done, Op.BACKWARD)
        rows[stage % ranks].append(Action(stage, op, microbatch))
        progress[microbatch] += 1
    return lower(tuple(map(tuple, rows)), how).rows()


@st.composite
def mutated_rows(draw: st.DrawFn) -> tuple[Row, ...]:
    """Right rows with up to three of: two cells swapped, one dropped, doubled or moved, two microbatches crossed."""
    rows = [list(row) for row in draw(right_rows())]
    for mutation in draw(st.lists(st.sampled_from(["swap", "drop", "double", "move", "cross", "batch"]), max_size=3)):
        row = draw(st.sampled_from(rows))
        if len(row) < 2:
            continue
        first, second = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        one, other = row[first], row[second]
        if mutation == "swap":
            row[first], row[second] = other, one
        elif mutation == "drop":
            del row[first]
        elif mutation == "double":
            row.insert(second, one)
        elif mutation == "move":
            row.insert(second, row.pop(first))
        elif mutation == "cross" and isinstance(one, Action) and isinstance(other, Action):
            row[first] = Action(one.stage, one.op, other.microbatch)
            row[second] = Action(other.stage, other.op, one.microbatch)
        elif mutation == "batch" and first < second and not computes(one) and not computes(other):
            row[first] = Batch((*actions_of(one), *actions_of(row.pop(second))))
    return tuple(map(tuple, rows))


WAIT = re.compile(
    r"rank (\d+) waits to (send|receive) (-?\d+)([FB])(\d+) (?:to|from) (rank \d+|stage -?\d+|itself)(.*)"
)


def check_cycle(rows: tuple[Row, ...], columns: list[int], cycle: tuple[str, ...]) -> None:
    """Each rank in the cycle is at that operation, and waits for the next one."""
    waits = [WAIT.fullmatch(sentence) for sentence in cycle]
    assert all(waits), cycle
    ranks = [int(wait[1]) for wait in waits]
    for wait, rank, following in zip(waits, ranks, [*ranks[1:], ranks[0]], strict=True):
        op = Op[f"{'SEND' if wait[2] == 'send' else 'RECV'}_{wait[4]}"]
        toward = {Op.RECV_F: 1, Op.RECV_B: -1}.get(op, 0)
        assert Action(int(wait[3]) + toward, op, int(wait[5])) in actions_of(rows[rank][columns[rank]])
        if wait[7]:
            assert len(cycle) == 1
        else:
            assert wait[6] == ("itself" if rank == following else f"rank {following}")


@settings(max_examples=1000, deadline=None)
@given(rows=st.one_of(right_rows(), mutated_rows()))
def test_agrees_with_all_interleavings(rows: tuple[Row, ...]) -> None:
    for transport in TRANSPORTS:
        ends = Explorer(rows, transport).ends()
        assert len(ends) == 1, "such programs have no choice"
        (end,) = ends
        outcome = evaluate(rows, transport)
        event(f"{transport}: {'finished' if outcome.finished else 'stuck'}")
        blocks = [[column for column, cell in enumerate(row) if not computes(cell)] for row in rows]
        columns = [[*block, len(row)][at] for block, row, at in zip(blocks, rows, end.columns, strict=True)]
        assert outcome.finished == all(column == len(row) for column, row in zip(columns, rows, strict=True))
        assert outcome.last == tuple(row[at - 1] if at else None for row, at in zip(rows, columns, strict=True))
        assert len(outcome.mismatches) == end.swaps
        assert bool(outcome.cycle) is not outcome.finished
        if outcome.cycle:
            check_cycle(rows, columns, outcome.cycle)


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
