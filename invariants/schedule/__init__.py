"""Pipeline schedules as data: made, read, lowered and judged, at any size; no torch, no processes.

One type, `Schedule`, holds them. `generate` makes the known families, `read_csv` and `of_torch` and its neighbours in
`convert` take those of others, `lower` adds sends and receives. `complete` says what is missing or out of order,
`evaluate` whether it ends on a transport and `smallest` where it sticks, `simulate` when everything runs under `Costs`,
`in_flight` what is held, `best_split` how layers are divided. `formulas` has the closed forms, `drawn` the Hypothesis
strategies, which are imported by those who ask for them.
"""

from invariants.schedule.activations import in_flight
from invariants.schedule.balance import best_split
from invariants.schedule.completeness import complete
from invariants.schedule.convert import of_actions, of_deepspeed, of_megatron, of_torch, of_tuples
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.minimal import smallest
from invariants.schedule.order import Outcome, evaluate
from invariants.schedule.table import Schedule
from invariants.schedule.text import format_csv, parse_csv, read_csv
from invariants.schedule.timeline import NeverEnds, Timeline, simulate
from invariants.schedule.transports import TRANSPORTS

__all__ = [
    "FAMILIES",
    "LOWERINGS",
    "TRANSPORTS",
    "Costs",
    "NeverEnds",
    "Outcome",
    "Schedule",
    "Timeline",
    "best_split",
    "complete",
    "evaluate",
    "format_csv",
    "generate",
    "in_flight",
    "lower",
    "of_actions",
    "of_deepspeed",
    "of_megatron",
    "of_torch",
    "of_tuples",
    "parse_csv",
    "read_csv",
    "simulate",
    "smallest",
]
