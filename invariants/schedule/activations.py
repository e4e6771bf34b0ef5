"""How many microbatches a stage holds activations for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from invariants.schedule.actions import Op, Row, actions_of
from invariants.schedule.table import Schedule, as_schedule

_CLOSES = (Op.BACKWARD, Op.WEIGHT_GRADIENT)


def in_flight(schedule: Schedule | Sequence[Row]) -> dict[int, int]:
    """Peak number of microbatches in flight on each stage that computes, in microbatches.

    A microbatch is in flight from its forward to its full backward, or to its weight gradient where the backward is
    split, since that still needs the layers' inputs.
    """
    peak: dict[int, int] = {}
    held: dict[int, set[int]] = defaultdict(set)
    for row in as_schedule(schedule).rows():
        for cell in row:
            for action in actions_of(cell):
                if action.op is Op.FORWARD:
                    held[action.stage].add(action.microbatch)
                    peak[action.stage] = max(peak.get(action.stage, 0), len(held[action.stage]))
                elif action.op in _CLOSES:
                    held[action.stage].discard(action.microbatch)
    return peak
