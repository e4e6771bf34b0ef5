"""Torch's own lowered schedules on every transport: its defaults end, and what `defer_pp_recv` makes of them."""

import pytest

from invariants.schedule.completeness import complete
from invariants.schedule.convert import of_torch
from invariants.schedule.order import evaluate
from invariants.schedule.transports import TRANSPORTS

ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
SEVERAL = (
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
GRID = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 2, 3, 4, 5, 8)]


def refused(name, ranks, microbatches):
    least = {"Schedule1F1B": ranks, "ScheduleDualPipeV": 2 * ranks}.get(name, 1)
    rounds = (
        max(1, microbatches // ranks) if name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble") else 1
    )
    return microbatches < least or microbatches % rounds > 0


def made(torch_schedule, name, **options):
    """The schedules of the grid that torch does not refuse, by their sizes."""
    for size in GRID:
        if refused(name, *size):
            with pytest.raises(ValueError, match=r"micro.?batches"):
                torch_schedule(name, *size, **options)
        else:
            yield size, of_torch(torch_schedule(name, *size, **options))


@pytest.mark.parametrize("name", ONE_STAGE + SEVERAL)
def test_the_defaults_are_complete_and_end_on_every_transport(torch_schedule, name):
    judged = 0
    for (_, microbatches), schedule in made(torch_schedule, name):
        assert complete(schedule, schedule.stages, microbatches) == []
        for transport in (*TRANSPORTS, "buffered(1)"):
            outcome = evaluate(schedule, transport)
            assert (outcome.finished, outcome.mismatches) == (True, ())
        judged += 1
    assert judged >= len(GRID) // 3


# Where receives are deferred: stuck with rendezvous sends, and on NCCL; never with buffers, or on gloo, where two
# messages of one size may be swapped instead.
DEFERRED = {
    "ScheduleInterleaved1F1B": ({"blocking", "nccl-lazy", "nccl-eager", "nccl-one-stream"}, 0),
    "ScheduleLoopedBFS": ({"blocking", "nccl-lazy", "nccl-eager", "nccl-one-stream"}, 0),
    "ScheduleInterleavedZeroBubble": ({"blocking", "nccl-lazy", "nccl-eager", "nccl-one-stream"}, 4),
    "ScheduleZBVZeroBubble": ({"blocking", "nccl-lazy", "nccl-eager", "nccl-one-stream"}, 2),
    "ScheduleDualPipeV": ({"blocking", "nccl-lazy", "nccl-eager", "nccl-one-stream"}, 0),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_deferred_receives_can_deadlock_at_2_ranks_and_4_microbatches(torch_schedule, name):
    schedule = of_torch(torch_schedule(name, 2, 4, defer_pp_recv=True))
    stuck, swaps = DEFERRED[name]
    outcomes = {transport: evaluate(schedule, transport) for transport in TRANSPORTS}
    assert {transport for transport, outcome in outcomes.items() if not outcome.finished} == stuck
    assert len(outcomes["gloo"].mismatches) == swaps
    assert complete(schedule, 4, 4) == [], "the order of each rank alone shows nothing"


def test_deferred_receives_can_deadlock_at_4_ranks_and_8_microbatches(torch_schedule):
    schedules = {name: of_torch(torch_schedule(name, 4, 8, defer_pp_recv=True)) for name in SEVERAL}
    assert not any(evaluate(schedule, "blocking").finished for schedule in schedules.values())
    ends = [name for name, schedule in schedules.items() if evaluate(schedule, "nccl-lazy").finished]
    assert ends == ["ScheduleLoopedBFS"], "with a stream a pair, its ring of ranks gets through"
