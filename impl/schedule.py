"""Pipeline schedules as data: what each stage does, in which order, with its sends and receives."""

from __future__ import annotations

from typing import Final

from impl.grid import ConfigurationError
from invariants.schedule.actions import Row
from invariants.schedule.compiled import only_where_it_pays
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower

NAMES: Final = ("gpipe", "1f1b")
LOWERING = "receive-first"
"""Stage s receives the gradient B_i before it sends the activation F_(w+i). The textbook order sends first, and then
both neighbours wait for ever where a send ends only when it is received. Receiving first costs nothing: the next stage
computes B_i before F_(w+i) anyway."""


def instructions(name: str, stages: int, microbatches: int) -> tuple[Row, ...]:
    """One row a stage: F, B, SEND_F, RECV_F, SEND_B, RECV_B in program order, for one global batch."""
    if name not in NAMES:
        raise ConfigurationError(f"schedule={name}: expected one of {', '.join(NAMES)}")
    with only_where_it_pays(2 * stages * microbatches):  # each rank would import numba for itself
        return lower(generate(name, stages, microbatches), LOWERING).rows()
