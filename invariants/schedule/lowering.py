"""Lowering: computation in, the same order with sends and receives out.

A message between stages on different ranks is received right before the computation that needs it, and sent right after
the computation that made it. What is left to choose is the order of a send and a receive that fall between the same two
computations and *cross*: they go to and come from one peer, and the peer makes what we wait for before it needs what we
send. If both sides send first and sends are rendezvous, both wait for ever. GPipe has no crossing, so all lowerings of
it are the same, and free of deadlock. In 1F1B the steady pairs cross.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Batch, Cell, Op, Row, placement
from invariants.schedule.table import Schedule, as_schedule

Order = Callable[[int, Action, Action], tuple[Cell, ...]]
"""(rank, send, receive that crosses it) to the cells in program order."""


def textbook(_rank: int, send: Action, receive: Action) -> tuple[Cell, ...]:
    """Send first. Where two neighbours cross, both wait under rendezvous sends: 1F1B deadlocks for all N, M >= 2."""
    return send, receive


def receive_first(_rank: int, send: Action, receive: Action) -> tuple[Cell, ...]:
    """Receive the gradient before sending the activation, and send the gradient before receiving the activation.

    The next stage computes the gradient first anyway, so the activation comes no later than it is needed: free of
    deadlock under rendezvous sends, at the same makespan.
    """
    return (receive, send) if send.op is Op.SEND_F else (send, receive)


def even_first(rank: int, send: Action, receive: Action) -> tuple[Cell, ...]:
    """Even ranks send first, odd ranks receive first; needs neighbouring stages on ranks of different parity."""
    return (receive, send) if rank % 2 else (send, receive)


def batched(_rank: int, send: Action, receive: Action) -> tuple[Cell, ...]:
    """Post both together and wait for both: what `Schedule1F1B` of torch 2.13 does, which asks for M >= N."""
    return (Batch((send, receive)),)


LOWERINGS: Final[Mapping[str, Order]] = {
    "receive-first": receive_first,
    "textbook": textbook,
    "even-first": even_first,
    "batched": batched,
}
"""Each lowering by its name."""


def lower(schedule: Schedule | Sequence[Row], how: str) -> Schedule:
    """Add the sends and receives to rows that hold computation only, in the order that `how` names.

    Stages that share a rank exchange nothing. Orders other than those of `families` are lowered by the same rules,
    without a promise that they end: `order.evaluate` decides. A lowering that does not exist, rows that communicate
    already, and a stage on two ranks are each a `UsageError`.
    """
    if how not in LOWERINGS:
        raise UsageError(f"lowering {how!r}: expected one of {', '.join(LOWERINGS)}")
    rows = as_schedule(schedule).rows()
    plan = _Plan(placement(rows), _positions(rows), LOWERINGS[how])
    return Schedule.of_rows(_lower_row(rank, row, plan) for rank, row in enumerate(rows))


@dataclass(frozen=True)
class _Plan:
    ranks: Mapping[int, int]
    positions: Mapping[tuple[int, bool, int], int]
    order: Order


def _positions(rows: Sequence[Row]) -> dict[tuple[int, bool, int], int]:
    """Column at which each message is made: by (stage, whether it is an activation, microbatch)."""
    positions: dict[tuple[int, bool, int], int] = {}
    for rank, row in enumerate(rows):
        for column, cell in enumerate(row):
            if not isinstance(cell, Action) or not cell.op.computes:
                raise UsageError(
                    f"schedule: {cell} at rank {rank}, column {column}: expected computation only to lower"
                )
            if cell.op is not Op.WEIGHT_GRADIENT:
                positions[cell.stage, cell.op.forward, cell.microbatch] = column
    return positions


def _lower_row(rank: int, row: Row, plan: _Plan) -> Row:
    lowered: list[Cell] = []
    send: Action | None = None
    for cell in row:
        assert isinstance(cell, Action), "_positions has refused batches"
        receive = _exchange(cell, Op.RECV_F, Op.RECV_B, plan)
        if send and receive and _cross(send, receive, plan):
            lowered += plan.order(rank, send, receive)
        else:
            lowered += [action for action in (send, receive) if action]
        lowered.append(cell)
        send = _exchange(cell, Op.SEND_F, Op.SEND_B, plan)
    return (*lowered, send) if send else tuple(lowered)


def _exchange(compute: Action, forward: Op, backward: Op, plan: _Plan) -> Action | None:
    """The send or receive that `compute` asks for; None where its partner is on the same rank, or does not exist."""
    if compute.op is Op.WEIGHT_GRADIENT:
        return None
    action = Action(compute.stage, forward if compute.op.forward else backward, compute.microbatch)
    partner = plan.ranks.get(action.peer)
    return None if partner is None or partner == plan.ranks[compute.stage] else action


def _cross(send: Action, receive: Action, plan: _Plan) -> bool:
    """Whether one peer is at the other end of both, and makes what we wait for before it needs what we send."""
    if plan.ranks[send.peer] != plan.ranks[receive.peer]:
        return False
    makes = plan.positions.get((receive.peer, receive.op.forward, receive.microbatch))
    needs = plan.positions.get((send.peer, send.op.forward, send.microbatch))
    return makes is not None and needs is not None and makes < needs
