"""In which cases a planted fault of `faults.py` changes anything."""

from __future__ import annotations

from collections.abc import Callable

from invariants.case import Case

Applies = Callable[[Case], bool]


def always(_case: Case) -> bool:
    """Whatever the case."""
    return True


def several_stages(case: Case) -> bool:
    """Whether there is a pipeline."""
    return case.topology.size("pp") > 1


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
