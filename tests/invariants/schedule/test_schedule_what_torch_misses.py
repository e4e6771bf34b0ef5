"""What the tools in `torch.distributed.pipelining.schedules` accept though it is wrong, or refuse though it is right.

Each test shows both sides, torch 2.13: its `_validate_schedule`, its `_simulate_comms_compute`, its `_Action.from_str`;
and what we say of the same rows.
"""

import pytest
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute, _validate_schedule

from invariants.errors import UsageError
from invariants.schedule.completeness import complete
from invariants.schedule.convert import of_actions, of_torch
from invariants.schedule.order import evaluate
from invariants.schedule.text import parse_csv
from invariants.schedule.timeline import NeverEnds, simulate

MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def read(*rows):
    """Rows in torch's form."""
    return {rank: [_Action.from_str(cell) for cell in row.split()] for rank, row in enumerate(rows)}


def simulator_accepts(order, stages):
    """Whether torch's simulator runs the rows to their end, stage s being on rank s."""
    steps = _simulate_comms_compute(order, lambda stage: stage, stages)
    done = {action for row in steps.values() for action in row if action is not None}
    return done == {action for row in order.values() for action in row}


def validator_accepts(order, stages, microbatches):
    """Whether torch's validator finds each stage on one rank, and nothing to say."""
    return _validate_schedule(order, len(order), stages, microbatches) == {stage: stage for stage in range(stages)}


LOWERED = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


def test_the_right_rows_pass_both():
    assert simulator_accepts(read(*LOWERED), 2)
    assert validator_accepts(read(*LOWERED), 2, 1)
    assert complete(of_actions(read(*LOWERED)), 2, 1) == []
    assert evaluate(of_actions(read(*LOWERED)), "blocking").finished


def test_a_crossed_send_and_send_deadlocks():
    order = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    assert simulator_accepts(order, 2)
    schedule = of_actions(order)
    assert complete(schedule, 2, 2) == []
    assert evaluate(schedule, "buffered").finished
    outcome = evaluate(schedule, "blocking")
    assert not outcome.finished
    assert outcome.cycle == ("rank 0 waits to send 0F1 to rank 1", "rank 1 waits to send 1B0 to rank 0")


def test_a_surplus_send():
    order = read(f"{LOWERED[0]} 0SEND_F0", LOWERED[1])
    assert simulator_accepts(order, 2)
    schedule = of_actions(order)
    assert complete(schedule, 2, 1) == ["0SEND_F0 occurs 2 times: rank 0, column 1; rank 0, column 4"]
    outcome = evaluate(schedule, "blocking")
    assert outcome.cycle == ("rank 0 waits to send 0F0 to rank 1, which has finished",)


def test_receives_out_of_send_order():
    order = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    assert simulator_accepts(order, 2)
    outcome = evaluate(of_actions(order), "buffered")
    assert outcome.finished
    assert outcome.mismatches == (
        "rank 0 sends 0F0, and rank 1 receives it as 0F1",
        "rank 0 sends 0F1, and rank 1 receives it as 0F0",
    )


def test_a_backward_before_its_forward_on_the_last_stage():
    order = read(LOWERED[0], "1B0 1SEND_B0 1RECV_F0 1F0")
    assert simulator_accepts(order, 2)
    problems = complete(of_actions(order), 2, 1)
    assert "1B0 at rank 1, column 0 comes before 1F0 at rank 1, column 3" in problems


def test_a_weight_gradient_before_its_input_gradient():
    order = read("0F0 0SEND_F0 0RECV_B0 0W0 0I0", "1RECV_F0 1F0 1W0 1I0 1SEND_B0")
    assert simulator_accepts(order, 2)
    assert complete(of_actions(order), 2, 1) == [
        "0W0 at rank 0, column 3 comes before 0I0 at rank 0, column 4",
        "1W0 at rank 1, column 2 comes before 1I0 at rank 1, column 3",
    ]


@pytest.mark.parametrize("name", MULTI)
def test_the_lowered_schedules_of_torch_itself_are_right(torch_schedule, name):
    schedule = torch_schedule(f"Schedule{name}", 2, 4)
    with pytest.raises(ValueError, match=r"Unsupported action type .*(UNSHARD|RESHARD|REDUCE_GRAD|OVERLAP_F_B)"):
        schedule._simulate()
    ours = of_torch(schedule)
    assert complete(ours, 4, 4) == []
    assert evaluate(ours, "buffered").finished


@pytest.mark.parametrize("name", MULTI)
def test_deferred_receives_can_deadlock(torch_schedule, name):
    schedule = of_torch(torch_schedule(f"Schedule{name}", 2, 4, defer_pp_recv=True))
    assert complete(schedule, 4, 4) == []
    assert evaluate(schedule, "buffered").finished
    outcome = evaluate(schedule, "blocking")
    assert not outcome.finished
    assert len(outcome.cycle) == 2


def test_the_order_that_1f1b_shows_is_not_the_one_that_it_runs(torch_schedule):
    live = torch_schedule("Schedule1F1B", 2, 2)
    shown = of_actions(live.pipeline_order)
    assert " ".join(map(str, shown.row(1))) == "1F1 1B0 1F2 1B1 1REDUCE_GRAD"
    problems = complete(shown, 2, 2)
    assert "1F0 is missing" in problems
    assert "1F2 at rank 1, column 2: there is no microbatch 2" in problems
    assert " ".join(map(str, of_torch(live, lowered=False).row(1))) == "1F0 1B0 1F1 1B1"
    assert complete(of_torch(live), 2, 2) == []


@pytest.mark.parametrize(
    ("rows", "microbatches", "problem"),
    [
        pytest.param(
            ("0F0 0F0 0B0", "1F0 1B0"), 1, "0F0 occurs 2 times: rank 0, column 0; rank 0, column 1", id="F twice"
        ),
        pytest.param(
            ("0F0 0B0 0B0", "1F0 1B0"), 1, "0B0 occurs 2 times: rank 0, column 1; rank 0, column 2", id="B twice"
        ),
        pytest.param(
            ("0F0 0F7 0B0 0B7", "1F0 1F7 1B0 1B7"), 2, "0F7 at rank 0, column 1: there is no microbatch 7", id="range"
        ),
        pytest.param(("0F0 0F2 0B0 0B2", "1F0 1F2 1B0 1B2"), 2, "0F1 is missing", id="one microbatch never"),
        pytest.param(
            ("0F0 0F1 0B0 0I0 0W0", "1F0 1F1 1B0 1B1"),
            2,
            "0B0 at rank 0, column 2 is done again by 0I0 at rank 0, column 3",
            id="one microbatch twice",
        ),
        pytest.param(
            ("0F0 0F1 0B0 0I0 0W0", "1F0 1F1 1B0 1B1"), 2, "0B1 is missing", id="another never, beside the one twice"
        ),
    ],
)
def test_what_is_twice_or_never_or_out_of_range(rows, microbatches, problem):
    order = read(*rows)
    assert validator_accepts(order, 2, microbatches)
    assert problem in complete(of_actions(order), 2, microbatches)


def test_computation_that_waits_across_ranks():
    # Rank 0 wants 1B1 of rank 1 before it makes 0F0, which rank 1 wants before it makes 1B1.
    order = read("0F1 0B1 0F0 0B0", "1F0 1F1 1B1 1B0")
    assert validator_accepts(order, 2, 2)
    with pytest.raises(NeverEnds, match="rank 0 waits at 0B1 for 1B1"):
        simulate(of_actions(order))


def test_junk_after_a_cell():
    assert str(_Action.from_str("0F0junk")) == "0F0"
    with pytest.raises(UsageError, match=r"row 1 of 1 \(rank 0\), column 2 of 2: schedule cell '0F0junk': expected"):
        parse_csv("0F1,0F0junk\n", "mine.csv")
