"""Sends and receives placed next to the computations that make and need them, in one compiled pass."""

from __future__ import annotations

import numpy as np
from numpy import uint32
from numpy.typing import NDArray

from invariants.schedule.compiled import loop
from invariants.schedule.memory import columns
from invariants.schedule.table import RECV_F, SEND_F, B, Schedule


def placed(table: Schedule, sends: NDArray[np.uint8], receives: NDArray[np.uint8], rule: int) -> Schedule:
    """A schedule of computation without compound cells, with the messages that its computations ask for.

    `sends` and `receives` [4, S]: code of what a computation asks for, by its code and its stage; 0 for nothing.
    `rule`: who receives before it sends where the two cross: nobody (0), who sends an activation (1), odd ranks (2).
    """
    size = 3 * len(table)
    lengths = np.zeros(table.ranks, np.int64)
    stage, microbatch, op, joint = columns(size, np.int32, np.int32, np.uint8, np.uint8)
    given = table.starts, table.op, table.stage, table.microbatch, sends, receives, table.placement, table.makers, rule
    size = _place(*given, lengths, op, stage, microbatch)
    lowered = Schedule.of_arrays(lengths, op[:size], stage[:size], microbatch[:size], joint[:size])
    # Known from the computation, which is a third of it.
    lowered.__dict__.update(placement=table.placement, communicates=size > len(table))
    return lowered


@loop
def _place(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    sends: NDArray[np.uint8],
    receives: NDArray[np.uint8],
    placement: NDArray[np.int32],
    makers: NDArray[np.int32],
    rule: int,
    lengths: NDArray[np.int64],
    codes: NDArray[np.uint8],
    places: NDArray[np.int32],
    numbers: NDArray[np.int32],
) -> int:
    out = uint32(0)
    for rank in range(len(starts) - 1):
        begin, sent, before, number = out, uint32(0), uint32(0), uint32(0)
        for i in range(uint32(starts[rank]), uint32(starts[rank + 1])):
            here, place, of = op[i], uint32(stage[i]), uint32(microbatch[i])
            asks = here <= B and stage[i] >= 0
            received = uint32(receives[here, place]) if asks else uint32(0)
            if sent:
                if received and rule:
                    source = uint32(place + (-1 if received == RECV_F else 1))
                    to = uint32(before + (1 if sent == SEND_F else -1))
                    if placement[source] == placement[to]:
                        makes = makers[source, uint32(received == RECV_F), of]
                        needs = makers[to, uint32(sent == SEND_F), number]
                        if 0 <= makes < needs and (sent == SEND_F if rule == 1 else rank % 2 == 1):
                            codes[out], places[out], numbers[out] = received, place, of
                            out, received = uint32(out + 1), uint32(0)
                codes[out], places[out], numbers[out] = sent, before, number
                out = uint32(out + 1)
            if received:
                codes[out], places[out], numbers[out] = received, place, of
                out = uint32(out + 1)
            codes[out], places[out], numbers[out] = here, place, of
            out = uint32(out + 1)
            sent, before, number = uint32(sends[here, place]) if asks else uint32(0), place, of
        if sent:
            codes[out], places[out], numbers[out] = sent, before, number
            out = uint32(out + 1)
        lengths[rank] = out - begin
    return int(out)
