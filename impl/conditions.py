"""In which cases a planted fault of `faults.py` changes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from invariants.case import Case
from invariants.schedule.balance import balance

Applies = Callable[[Case], bool]


def always(_case: Case) -> bool:
    """Whatever the case."""
    return True


def several_stages(case: Case) -> bool:
    """Whether there is a pipeline."""
    return case.topology.size("pp") > 1


def misled_by(counts: Callable[[Any], Sequence[float]]) -> Applies:
    """Where `impl` chooses the split, and one by these costs has a larger stage than need be."""
    return lambda case: _excess(case, counts) not in (None, 0)


def served_by(counts: Callable[[Any], Sequence[float]]) -> Applies:
    """Where `impl` chooses the split, and one by these costs is as good as any."""
    return lambda case: _excess(case, counts) == 0


def _excess(case: Case, counts: Callable[[Any], Sequence[float]]) -> Fraction | None:
    from impl.partition import estimated_costs, partition

    stages = case.topology.size("pp")
    if stages < 2 or case.split is not None or stages > case.model.layers + 2:
        return None
    gpt: Any = case.model  # sizes have the same names there
    chosen = balance(estimated_costs(gpt), partition(counts(gpt), stages))
    return chosen.largest - chosen.least


def several_replicas(case: Case) -> bool:
    """Whether there is data parallelism."""
    return case.topology.size("dp") > 1


def several_microbatches(case: Case) -> bool:
    """Whether a replica cuts its batch."""
    return case.microbatches > 1


def several_batches(case: Case) -> bool:
    """Whether a step accumulates."""
    return max(case.windows) > 1


def uneven(case: Case) -> bool:
    """Whether token counts differ."""
    return case.mask != "full"


def tied_over_stages(case: Case) -> bool:
    """Whether two stages train one weight."""
    return case.model.tied and several_stages(case) and 0 not in case.frozen


def single_precision(case: Case) -> bool:
    """Whether numbers are float32."""
    return case.precision == "float32"


def adaptive(case: Case) -> bool:
    """Whether there is optimizer state."""
    return case.optimizer.kind != "sgd"


def all_of(*conditions: Applies) -> Applies:
    """Whether all conditions hold."""
    return lambda case: all(condition(case) for condition in conditions)


def several_ranks(case: Case) -> bool:
    """Whether anything is sent."""
    return case.topology.world_size > 1


def no_replicas(case: Case) -> bool:
    """Whether there is no data parallelism."""
    return not several_replicas(case)


def one_forward_one_backward(case: Case) -> bool:
    """Whether the schedule is 1F1B."""
    return case.schedule == "1f1b"
