"""Every transport against a search of all interleavings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from invariants.schedule.actions import Action, Batch, Cell, Op, Row, actions_of, parse_rows
from invariants.schedule.families import generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.order import evaluate
from invariants.schedule.transports import TRANSPORTS

POSTED = ("gloo", "nccl-lazy", "nccl-eager", "nccl-one-stream")
"""Transports on which the host posts and goes on."""
STATES = 20_000


def read(*rows: str) -> tuple[Row, ...]:
    return parse_rows(row.split() for row in rows)


class Operation(NamedTuple):
    action: Action
    channel: tuple[object, ...]
    sends: bool


@dataclass
class Step:
    operations: list[int]
    waits: bool
    met: list[int] = field(default_factory=list)  # operations that must have met before it starts
    past: list[tuple[int, int]] = field(default_factory=list)  # (queue, number of cells that it must have done)


class State(NamedTuple):
    at: tuple[int, ...]
    posted: tuple[bool, ...]
    open: frozenset[int]
    swaps: int


class Explorer:
    """The slow, obviously right way: every interleaving, one small step at a time.

    A step starts the next cell of a queue, lets the oldest send and the oldest receive of a channel meet, or takes a
    queue to its next cell.
    """

    def __init__(self, rows: tuple[Row, ...], transport: str) -> None:
        self.room = {"buffered": 99, "buffered(1)": 1, "buffered(2)": 2}.get(transport, 0)
        self.homes = {
            a.stage: rank for rank, row in enumerate(rows) for c in row for a in actions_of(c) if a.op.computes
        }
        self.operations: list[Operation] = []
        self.queues: list[list[Step]] = []
        for rank, row in enumerate(rows):
            self.add(rank, row, transport)

    def add(self, rank: int, row: Row, transport: str) -> None:
        streams: dict[object, int] = {}
        received: dict[tuple[int, Op, int], int] = {}
        computing: list[tuple[Step, Cell]] = []
        computed: tuple[int, int] | None = None
        for cell in row:
            computes = not any(action.op.exchanges for action in actions_of(cell))
            peers = {self.peer(action) for action in actions_of(cell)}
            line = "group" if isinstance(cell, Batch) or transport == "nccl-eager" else "pair"
            stream = "host"
            if transport.startswith("nccl"):
                stream = "compute" if computes else "communication"
                if transport == "nccl-lazy" and line == "pair" and not computes:
                    stream = f"pair {peers}"
            if stream not in streams:
                streams[stream] = len(self.queues)
                self.queues.append([])
            made = Step([], waits=transport != "gloo")
            for action in actions_of(cell):
                if action.op.exchanges:
                    if action.op in (Op.RECV_F, Op.RECV_B):
                        received.setdefault((action.stage, action.op, action.microbatch), len(self.operations))
                    made.operations.append(len(self.operations))
                    self.operations.append(self.operation(rank, action, line if transport.startswith("nccl") else ""))
            if computes:
                computing.append((made, cell))
            elif transport.startswith("nccl") and computed:
                made.past.append(computed)
            self.queues[streams[stream]].append(made)
            if computes:
                computed = (streams[stream], len(self.queues[streams[stream]]))
        if transport in POSTED:
            for made, cell in computing:
                for action in actions_of(cell):
                    needed = Op.RECV_F if action.op is Op.FORWARD else Op.RECV_B
                    operation = received.get((action.stage, needed, action.microbatch))
                    if operation is not None and action.op is not Op.WEIGHT_GRADIENT:
                        made.met.append(operation)

    def peer(self, action: Action) -> int:
        return self.homes.get(action.peer, -1) if action.op.exchanges else -2

    def operation(self, rank: int, action: Action, line: str) -> Operation:
        ends = (rank, self.peer(action)) if action.op.sends else (self.peer(action), rank)
        return Operation(action, (*ends, line), action.op.sends)

    def ends(self) -> set[State]:
        """Where a run can come to rest."""
        start = State((0,) * len(self.queues), (False,) * len(self.queues), frozenset(), 0)
        seen, todo, ends = {start}, [start], set()
        while todo:
            state = todo.pop()
            following = {*self.starts(state), *self.meetings(state), *self.advances(state)}
            if not following:
                ends.add(state)
            todo += following - seen
            seen |= following
            assume(len(seen) < STATES)
        return ends

    def met(self, state: State, operation: int) -> bool:
        for queue, cells in enumerate(self.queues):
            for number, cell in enumerate(cells):
                if operation in cell.operations:
                    started = number < state.at[queue] or (number == state.at[queue] and state.posted[queue])
                    return started and operation not in state.open
        raise AssertionError(operation)

    def starts(self, state: State) -> Iterator[State]:
        for queue, cells in enumerate(self.queues):
            if state.at[queue] == len(cells) or state.posted[queue]:
                continue
            cell = cells[state.at[queue]]
            if all(self.met(state, operation) for operation in cell.met) and all(
                state.at[other] >= number for other, number in cell.past
            ):
                posted = put(state.posted, queue, True)
                yield state._replace(posted=posted, open=state.open | frozenset(cell.operations))

    def meetings(self, state: State) -> Iterator[State]:
        oldest: dict[tuple[object, bool], int] = {}
        for number in sorted(state.open, reverse=True):
            oldest[self.operations[number].channel, self.operations[number].sends] = number
        for (channel, sends), number in oldest.items():
            partner = oldest.get((channel, False))
            if sends and partner is not None and -1 not in channel:
                swapped = not same_message(self.operations[number].action, self.operations[partner].action)
                yield state._replace(open=state.open - {number, partner}, swaps=state.swaps + swapped)

    def advances(self, state: State) -> Iterator[State]:
        for queue, posted in enumerate(state.posted):
            if posted:
                cell = self.queues[queue][state.at[queue]]
                if not cell.waits or not any(self.holds(state, number) for number in cell.operations):
                    yield state._replace(
                        at=put(state.at, queue, state.at[queue] + 1), posted=put(state.posted, queue, False)
                    )

    def holds(self, state: State, number: int) -> bool:
        """Whether an operation keeps its queue from going on: buffers let the oldest sends of a channel go."""
        if number not in state.open:
            return False
        operation = self.operations[number]
        older = [n for n in state.open if n < number and self.operations[n][1:] == operation[1:]]
        return not operation.sends or len(older) >= self.room

    def finished(self, state: State) -> bool:
        through = all(at == len(cells) for at, cells in zip(state.at, self.queues, strict=True))
        return through and (not state.open or self.room > 0)


def put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def same_message(send: Action, receive: Action) -> bool:
    fits = {Op.RECV_F: (Op.SEND_F, receive.stage - 1), Op.RECV_B: (Op.SEND_B, receive.stage + 1)}
    return fits[receive.op] == (send.op, send.stage) and send.microbatch == receive.microbatch


def exchanges(cell: Cell) -> bool:
    return all(action.op.exchanges for action in actions_of(cell))


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
        elif mutation == "batch" and first < second and exchanges(one) and exchanges(other):
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


@settings(max_examples=250)
@given(st.one_of(right_rows(), mutated_rows()), st.sampled_from([*TRANSPORTS, "buffered(1)", "buffered(2)"]))
def test_agrees_with_all_interleavings(rows: tuple[Row, ...], transport: str) -> None:
    explorer = Explorer(rows, transport)
    ends = explorer.ends()
    assert len(ends) == 1, "such programs have no choice"
    (end,) = ends
    outcome = evaluate(rows, transport)
    event(f"{transport}: {'finished' if outcome.finished else 'stuck'}")
    assert outcome.finished == explorer.finished(end)
    assert len(outcome.mismatches) == end.swaps
    assert bool(outcome.cycle) is not outcome.finished
    if transport not in POSTED:
        columns = list(end.at)
        assert outcome.last == tuple(row[at - 1] if at else None for row, at in zip(rows, columns, strict=True))
        if outcome.cycle and not transport.startswith("buffered("):
            check_cycle(rows, columns, outcome.cycle)
