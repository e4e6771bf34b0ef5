"""Whether a schedule does everything once, in an order in which each result exists before it is used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from invariants.schedule.actions import Action, Op, Row, actions_of, communicates
from invariants.schedule.table import Schedule, as_schedule


def complete(schedule: Schedule | Sequence[Row], stages: int, microbatches: int, first_trained: int = 0) -> list[str]:
    """What is wrong with the rows, one sentence a problem; empty where nothing is.

    Each stage computes on one rank. Each (stage, microbatch) has one forward and one backward B, or one input gradient
    I and one weight gradient W: B and I after F, W after I. Nothing is out of range or done twice. Where the rows
    communicate, each send has its receive, a send comes after the computation that made its message, a receive before
    the one that needs it, and whatever crosses ranks is exchanged. Rows that hold computation only leave the order
    between ranks to the data. Stages before `first_trained` hold no trained parameter: no gradient need reach them,
    though one may.
    """
    rows = as_schedule(schedule).rows()
    places: dict[Action, list[_Place]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for column, cell in enumerate(row):
            for action in actions_of(cell):
                places[action].append(_Place(rank, column))
    problems = [*_out_of_place(places, stages, microbatches)]
    exchanges = communicates(rows)
    known = {action: where[0] for action, where in places.items()}
    for stage in range(stages):
        for microbatch in range(microbatches):
            problems += _computations(known, stage, microbatch)
            problems += _input(known, stage, stage - 1, Op.RECV_F, microbatch, exchanges)
            if stage >= first_trained:
                problems += _input(known, stage, stage + 1, Op.RECV_B, microbatch, exchanges)
    for action in known:
        if not action.op.computes and action.stage in range(stages) and action.peer in range(stages):
            problems += _exchange(known, action)
    return problems


class _Place(NamedTuple):
    rank: int
    column: int

    def __str__(self) -> str:
        return f"rank {self.rank}, column {self.column}"


_Places = Mapping[Action, _Place]
"""Where each action is, first."""


def _out_of_place(places: Mapping[Action, Sequence[_Place]], stages: int, microbatches: int) -> Iterator[str]:
    """What is out of range, done twice, or on another rank than the first computation of its stage."""
    homes: dict[int, _Place] = {}
    for action, where in places.items():
        if action.op.computes:
            homes.setdefault(action.stage, where[0])
    for action, where in places.items():
        if action.stage not in range(stages):
            yield f"{action} at {where[0]}: there is no stage {action.stage}"
        elif action.microbatch not in range(microbatches):
            yield f"{action} at {where[0]}: there is no microbatch {action.microbatch}"
        elif not action.op.computes and action.peer not in range(stages):
            yield f"{action} at {where[0]}: there is no stage {action.peer}"
        if len(where) > 1:
            yield f"{action} occurs {len(where)} times: {'; '.join(map(str, where))}"
        home = homes.get(action.stage)
        for place in where:
            if home and place.rank != home.rank:
                yield f"{action} at {place}: stage {action.stage} computes on rank {home.rank}"


def _computations(places: _Places, stage: int, microbatch: int) -> Iterator[str]:
    """F, then B, or I and W."""
    forward, full, inputs, weights = (
        Action(stage, op, microbatch) for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
    )
    split = [action for action in (inputs, weights) if action in places]
    if full in places and split:
        yield f"{full} at {places[full]} is done again by {split[0]} at {places[split[0]]}"
    elif split:
        yield from (f"{action} is missing" for action in (inputs, weights) if action not in places)
    elif full not in places:
        yield f"{full} is missing"
    if forward not in places:
        yield f"{forward} is missing"
    for earlier, later in ((forward, full), (forward, inputs), (inputs, weights)):
        yield from _late(places, earlier, later)


def _input(places: _Places, stage: int, neighbour: int, receive: Op, microbatch: int, exchanges: bool) -> Iterator[str]:
    """The result of a neighbouring stage that a computation of this stage needs: made before, or received."""
    source = _result(places, neighbour, microbatch, forward=receive.forward)
    needs = _result(places, stage, microbatch, forward=receive.forward)
    if source is None or needs is None:
        return
    if places[source].rank == places[needs].rank:
        yield from _late(places, source, needs)
    elif exchanges and (received := Action(stage, receive, microbatch)) not in places:
        yield f"{needs} at {places[needs]} needs {source} of rank {places[source].rank}: {received} is missing"


def _exchange(places: _Places, action: Action) -> Iterator[str]:
    """A send after the computation of its message, a receive before the computation that needs it, and its partner."""
    partner = Action(action.peer, _PARTNERS[action.op], action.microbatch)
    if partner not in places:
        yield f"{action} at {places[action]} has no {partner}"
    computation = _result(places, action.stage, action.microbatch, forward=action.op.forward)
    if computation:
        yield from _late(places, *((computation, action) if action.op.sends else (action, computation)))


_PARTNERS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}


def _result(places: _Places, stage: int, microbatch: int, *, forward: bool) -> Action | None:
    """The computation that makes an output or an input's gradient; None where the schedule lacks it."""
    ops = (Op.FORWARD,) if forward else (Op.BACKWARD, Op.INPUT_GRADIENT)
    return next((action for op in ops if (action := Action(stage, op, microbatch)) in places), None)


def _late(places: _Places, earlier: Action, later: Action) -> Iterator[str]:
    """Complain where both are on one rank in the wrong order."""
    first, second = places.get(earlier), places.get(later)
    if first and second and first.rank == second.rank and first.column > second.column:
        yield f"{later} at {second} comes before {earlier} at {first}"
