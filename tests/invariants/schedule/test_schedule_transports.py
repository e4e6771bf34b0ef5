"""The transports: what holds for all of them, literally and in general, and the numpy way beside the compiled one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Row, parse_rows
from invariants.schedule.compiled import OFF, available
from invariants.schedule.completeness import complete
from invariants.schedule.drawn import mutated_schedules, schedules
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import Schedule
from invariants.schedule.text import parse_csv
from invariants.schedule.transports import TRANSPORTS, wire

POSTED = ("gloo", "nccl-lazy", "nccl-eager", "nccl-one-stream")
"""Transports on which the host posts and goes on."""

anything = st.one_of(schedules(), mutated_schedules().map(lambda mutated: mutated.schedule))
drawn = anything.filter(
    lambda schedule: not any("computes on rank" in problem for problem in complete(schedule, 99, 99))
)
"""No stage on two ranks: nobody could say then who sends to whom."""


def read(*rows: str) -> tuple[Row, ...]:
    return parse_rows(row.split() for row in rows)


def judged(schedule: Schedule, transport: str) -> tuple[object, ...]:
    """All that is found, made anew: what a schedule knows of itself, it keeps."""
    fresh = Schedule(*schedule.columns)
    wiring = wire(fresh, transport)
    return evaluate(fresh, transport), wiring.partner.tolist(), fresh.placement.tolist(), fresh.makers.tolist()


@given(drawn, st.sampled_from([*TRANSPORTS, "buffered(0)", "buffered(2)"]))
def test_numpy_finds_what_the_compiled_loops_find(schedule: Schedule, transport: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        compiled = judged(schedule, transport)
        patch.setenv(OFF, "1")
        assert not available()
        assert judged(schedule, transport) == compiled


@pytest.mark.parametrize("name", FAMILIES)
def test_numpy_lowers_and_judges_larger_schedules_alike(name: str) -> None:
    found = []
    for off in ("", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OFF, off)
            schedule = generate(name, 6, 19)
            lowered = [lower(schedule, how) for how in LOWERINGS]
            verdicts = [judged(each, transport) for each in lowered for transport in TRANSPORTS]
            found.append(([[column.tolist() for column in each.columns] for each in lowered], verdicts))
    assert found[0] == found[1]


@given(drawn)
def test_a_send_that_blocks_is_one_that_has_no_room(schedule: Schedule) -> None:
    assert evaluate(schedule, "buffered(0)").finished == evaluate(schedule, "blocking").finished
    assert evaluate(schedule, "buffered(999)") == evaluate(schedule, "buffered")


@given(drawn)
def test_more_room_never_hurts(schedule: Schedule) -> None:
    ends = [
        evaluate(schedule, transport).finished for transport in ("blocking", "buffered(1)", "buffered(2)", "buffered")
    ]
    assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("transport", "cycle"),
    [
        ("buffered", ()),
        ("gloo", ()),
        ("blocking", ("rank 0 waits to send 0F1 to rank 1", "rank 1 waits to send 1B0 to rank 0")),
        (
            "nccl-lazy",
            (
                "rank 0 waits to send 0F1 to rank 1, before it receives 1B0",
                "rank 1 waits to send 1B0 to rank 0, before it receives 0F1",
            ),
        ),
    ],
)
def test_two_that_send_first(transport: str, cycle: tuple[str, ...]) -> None:
    assert evaluate(lower(generate("1f1b", 2, 2), "textbook"), transport).cycle == cycle


def test_single_operations_of_a_pair_share_a_stream_and_a_batch_does_not() -> None:
    batched = lower(generate("1f1b", 2, 2), "batched")
    assert [transport for transport in TRANSPORTS if not evaluate(batched, transport).finished] == []


def test_a_batch_never_meets_what_is_posted_alone_on_communicators_of_their_own() -> None:
    rows = read("0F0 (0SEND_F0;0RECV_B0)BATCH 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    stuck = [transport for transport in TRANSPORTS if not evaluate(rows, transport).finished]
    assert stuck == ["nccl-lazy", "nccl-one-stream"]


@pytest.mark.parametrize("transport", [*TRANSPORTS, "buffered(3)"])
def test_computation_alone_always_ends(transport: str) -> None:
    assert evaluate(generate("zb-v", 3, 7), transport).finished
    assert evaluate((), transport).finished
    assert evaluate(((), ()), transport).finished


@pytest.mark.parametrize("name", ["pigeon", "buffered(-1)", "buffered(x)", "Blocking", ""])
def test_an_unknown_transport_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=r"expected one of buffered, blocking, .*buffered\(k\)"):
        evaluate(read("0F0"), name)


@pytest.mark.parametrize("transport", POSTED)
def test_what_nobody_receives_is_awaited_when_the_step_ends(transport: str) -> None:
    outcome = evaluate(read("0F0 0SEND_F0 0SEND_F0", "1RECV_F0 1F0"), transport)
    assert not outcome.finished
    assert "which has no receive left for it" in outcome.cycle[0]


def test_a_computation_whose_data_nobody_sends_is_told_with_its_message() -> None:
    outcome = evaluate(read("0F0 0B0", "1RECV_F0 1F0 1B0"), "gloo")
    assert outcome.cycle == (
        "rank 1 waits to compute 1F0 until it has received 0F0 from rank 0, which has no send left for it",
    )
    outcome = evaluate(parse_csv("0F0,0RECV_B0,0B0,,,\n1F0,1B0,,,\n", "empty cells last"), "gloo")
    assert outcome.cycle == (
        "rank 0 waits to compute 0B0 until it has received 1B0 from rank 1, which has no send left for it",
    )


@given(schedules(lowered=False), st.sampled_from(list(LOWERINGS)))
def test_numpy_lowers_alike(schedule: Schedule, how: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        compiled = lower(Schedule(*schedule.columns), how)
        patch.setenv(OFF, "1")
        assert lower(Schedule(*schedule.columns), how) == compiled


@given(anything)
def test_numpy_finds_the_same_wrong(schedule: Schedule) -> None:
    sizes = schedule.stages, schedule.microbatches
    with pytest.MonkeyPatch.context() as patch:
        compiled = complete(Schedule(*schedule.columns), *sizes)
        patch.setenv(OFF, "1")
        assert complete(Schedule(*schedule.columns), *sizes) == compiled
