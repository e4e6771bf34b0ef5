"""The invariants of schedules, judged on literal evidence and over their whole domain; no processes."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Case, Topology
from invariants.catalog.schedule_activations import schedule_activations
from invariants.catalog.schedule_balanced import schedule_balanced
from invariants.catalog.schedule_bubble import schedule_bubble
from invariants.catalog.schedule_complete import schedule_complete
from invariants.catalog.schedule_deadlock_free import schedule_deadlock_free
from invariants.catalog.schedule_ordered import schedule_ordered
from invariants.evidence import Evidence, Owned, StagePeak
from invariants.schedule.actions import Op
from invariants.schedule.balance import best_split
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.lowering import LOWERINGS, lower
from invariants.target import Promises


def recorded(name, stages, microbatches, how=None, dp=1, rows=None):
    rows = generate(name, stages, microbatches).rows() if rows is None else rows
    rows = lower(rows, how).rows() if how else rows
    texts = tuple(tuple(map(str, row)) for row in rows for _ in range(dp))
    case = Case(topology=Topology.of(pp=stages, dp=dp), schedule=name, microbatches=microbatches)
    return Evidence("literal", case, Promises(), schedule=texts)


JUDGES = (schedule_complete, schedule_ordered, schedule_bubble, schedule_activations, schedule_deadlock_free)
sizes = st.integers(1, 5)
families = st.sampled_from(["gpipe", "1f1b"])


@settings(deadline=None)
@given(
    families, sizes, st.integers(1, 9), st.sampled_from(["receive-first", "even-first", "batched"]), st.integers(1, 2)
)
def test_right_schedules_hold_in_every_safe_order(name, stages, microbatches, how, dp):
    evidence = recorded(name, stages, microbatches, how, dp)
    assert [judged.judge(evidence).status for judged in JUDGES] == ["holds"] * len(JUDGES)


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(2, 9))
def test_every_stage_sends_before_it_receives(stages, microbatches):
    verdict = schedule_deadlock_free.judge(recorded("1f1b", stages, microbatches, "textbook"))
    assert verdict.status == "violated"
    assert [violation.what for violation in verdict.violations] == ["blocking sends"]
    assert "waits to send" in verdict.first.observed


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(0, 6))
def test_gpipe_order_under_the_name_of_1f1b_holds_too_much(stages, more):
    microbatches = stages + 1 + more
    evidence = recorded("1f1b", stages, microbatches, rows=generate("gpipe", stages, microbatches).rows())
    verdict = schedule_activations.judge(evidence)
    assert verdict.status == "violated"
    assert verdict.worst.stage == stages - 1
    assert verdict.worst.excess == microbatches


@st.composite
def sized(draw, name, ranks=5, microbatches=9):
    """(ranks, microbatches, stages a rank) at which the family exists."""
    many = draw(st.integers(1, ranks))
    family = FAMILIES[name]
    least = max(1, family.least * many)
    return many, draw(st.integers(least, least + microbatches)), family.virtual or draw(st.integers(1, 3))


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data(), dp=st.integers(1, 2))
def test_every_family_keeps_its_formulas_and_its_bounds(name, data, dp):
    ranks, microbatches, virtual = data.draw(sized(name))
    rows = generate(name, ranks, microbatches, virtual).rows()
    evidence = recorded(name, ranks, microbatches, dp=dp, rows=rows)
    assert [invariant.judge(evidence).violations for invariant in (schedule_bubble, schedule_activations)] == [(), ()]


@pytest.mark.parametrize(
    ("name", "runs", "sizes"),
    [
        ("interleaved-1f1b", "zb-v", (3, 6)),
        ("zb-h1", "zb-h2", (3, 5)),
        ("zb-h2", "zb-h1", (3, 5)),
        ("zb-v", "dualpipe-v", (2, 4)),
        ("dualpipe-v", "zb-v", (2, 4)),
    ],
)
def test_another_family_under_the_name_of_one_has_another_bubble(name, runs, sizes):
    verdict = schedule_bubble.judge(recorded(name, *sizes, rows=generate(runs, *sizes).rows()))
    assert verdict.status == "violated"
    assert all("at F=" in violation.what for violation in verdict.violations)


def test_idle_time_that_the_makespan_hides_is_seen_in_a_ranks_own_span():
    first, second = generate("zb-h2", 2, 3).rows()
    swapped = (*first[:2], first[3], first[2], *first[4:])
    assert " ".join(map(str, swapped)) == "0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2"
    violations = schedule_bubble.judge(recorded("zb-h2", 2, 3, rows=(swapped, second))).violations
    assert {violation.what.partition(" at ")[0] for violation in violations} == {"longest own span less its work"}
    assert (violations[0].rank, violations[0].expected, violations[0].observed) == (0, "0", "1")


def test_weight_gradients_at_the_end_hold_too_much():
    rows = []
    for row in generate("zb-v", 2, 9).rows():
        late = [cell for cell in row if cell.op is Op.WEIGHT_GRADIENT]
        rows.append((*(cell for cell in row if cell.op is not Op.WEIGHT_GRADIENT), *late))
    violations = schedule_activations.judge(recorded("zb-v", 2, 9, rows=rows)).violations
    assert {(v.rank, v.stage, v.expected, v.observed) for v in violations} == {
        (0, 0, "at most 4", "9"),
        (1, 1, "at most 3", "9"),
        (1, 2, "at most 2", "9"),
        (0, 3, "at most 1", "9"),
        (0, None, "at most 4", "18"),
        (1, None, "at most 4", "18"),
    }


@pytest.mark.parametrize("judged", [schedule_bubble, schedule_activations])
def test_sizes_at_which_a_family_does_not_exist_do_not_apply(judged):
    case = Case(topology=Topology.of(pp=2), schedule="dualpipe-v", microbatches=3)
    verdict = judged.judge(Evidence("literal", case, Promises(), schedule=(("0F0",), ("1F0",))))
    assert verdict.status == "not applicable"
    assert "expected 4 or more" in verdict.reason


@pytest.mark.parametrize("judged", [schedule_bubble, schedule_activations])
def test_a_stage_on_two_ranks_is_a_violation(judged):
    case = Case(topology=Topology.of(pp=2), schedule="1f1b", microbatches=1)
    rows = (("0F0", "0B0"), ("1F0", "1B0", "0F0"))
    (violation,) = judged.judge(Evidence("literal", case, Promises(), schedule=rows)).violations
    assert "stage 0 computes on rank 0 and on rank 1" in violation.observed


def test_a_stage_that_the_family_does_not_have_may_hold_nothing():
    rows = ["0F0 0B0", "1F0 2F0 2B0 1B0"]
    case = Case(topology=Topology.of(pp=2), schedule="1f1b", microbatches=1)
    evidence = Evidence("literal", case, Promises(), schedule=tuple(tuple(row.split()) for row in rows))
    first = schedule_activations.judge(evidence).violations[0]
    assert (first.rank, first.stage, first.expected, first.observed) == (1, 2, "at most 0", "1")


def test_serialised_microbatches_idle_more_than_the_formula():
    rows = ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    case = Case(topology=Topology.of(pp=2), schedule="1f1b", microbatches=2)
    evidence = Evidence("literal", case, Promises(), schedule=tuple(tuple(row.split()) for row in rows))
    verdict = schedule_bubble.judge(evidence)
    assert verdict.status == "violated"
    assert {(v.rank, v.expected, v.observed) for v in verdict.violations if v.stage is not None} == {
        (0, "1/3", "1/2"),
        (1, "1/3", "1/2"),
    }


def test_a_schedule_that_never_ends_has_no_bubble_to_measure():
    case = Case(topology=Topology.of(pp=1), schedule="gpipe", microbatches=1)
    verdict = schedule_bubble.judge(Evidence("literal", case, Promises(), schedule=(("0B0", "0F0"),)))
    assert verdict.status == "violated"


def test_what_is_held_at_run_time_counts():
    evidence = recorded("1f1b", 2, 3)
    kept = replace(evidence, activations=(StagePeak(0, 0, 1, 3, 0), StagePeak(1, 1, 1, 1, 2)))
    violations = schedule_activations.judge(kept).violations
    assert [(v.rank, v.expected, v.observed) for v in violations] == [(0, "at most 2", "3"), (1, "0", "2")]
    within = replace(evidence, activations=(StagePeak(0, 0, 1, 2, 0), StagePeak(1, 1, 1, 1, 0)))
    assert schedule_activations.judge(within).status == "holds"


def test_a_microbatch_that_is_never_computed():
    case = Case(topology=Topology.of(pp=1), microbatches=2)
    verdict = schedule_complete.judge(Evidence("literal", case, Promises(), schedule=(("0F0", "0B0"),)))
    assert verdict.status == "violated"


@pytest.mark.parametrize(("name", "virtual"), [("zb-v", 1), ("dualpipe-v", 1), ("interleaved-1f1b", 3), ("1f1b", 1)])
def test_a_last_stage_that_no_rank_computes_is_missed(name, virtual):
    schedule = generate(name, 2, 4, virtual)
    last = schedule.stage == schedule.stages - 1
    for kept, status in ((schedule, "holds"), (schedule.kept(~last), "violated")):
        assert schedule_complete.judge(recorded(name, 2, 4, rows=kept.rows())).status == status


def test_computation_alone_is_judged_in_the_declared_lowering_only():
    plain = recorded("1f1b", 2, 2)
    assert schedule_deadlock_free.judge(plain).status == "not applicable"
    for lowering, status in (("textbook", "violated"), ("receive-first", "holds")):
        declared = replace(plain, promises=Promises(lowering=lowering))
        assert schedule_deadlock_free.judge(declared).status == status


def test_frozen_first_stages_need_no_gradient():
    rows = (("0F0", "0SEND_F0", "0B0"), ("1RECV_F0", "1F0", "1B0"))
    case = Case(topology=Topology.of(pp=2), split=(1, 3), frozen=(0,))
    assert schedule_complete.judge(Evidence("literal", case, Promises(), schedule=rows)).status == "holds"
    trained = replace(case, frozen=(1,))
    assert schedule_complete.judge(Evidence("literal", trained, Promises(), schedule=rows)).status == "violated"


def test_messages_that_swap_their_places_are_found_though_the_schedule_ends():
    first = "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    second = "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    case = Case(topology=Topology.of(pp=2), microbatches=2)
    swapped = Evidence("literal", case, Promises(), schedule=(tuple(first.split()), tuple(second.split())))
    verdict = schedule_deadlock_free.judge(swapped)
    assert {violation.expected for violation in verdict.violations} == {"each receive gets its message"}
    in_order = replace(swapped, schedule=(swapped.schedule[0], ("1RECV_F0", "1RECV_F1", *swapped.schedule[1][2:])))
    assert schedule_deadlock_free.judge(in_order).status == "holds"


def test_ranks_tell_which_stages_are_frozen_where_the_target_has_chosen_the_split():
    rows = (("0F0", "0SEND_F0", "0B0"), ("1RECV_F0", "1F0", "1B0"))
    case = Case(topology=Topology.of(pp=2), frozen=(0,))
    evidence = Evidence("literal", case, Promises(), schedule=rows)

    def owned(rank, trainable):
        return Owned(rank, "parameter", f"w{rank}", 0, 1, 4, 0, "value", trainable, None, 1)

    told = replace(evidence, optimizer=(owned(0, False), owned(1, True)))
    assert schedule_complete.judge(told).status == "holds"
    told = replace(evidence, optimizer=(owned(0, True), owned(1, True)))
    assert schedule_complete.judge(told).status == "violated"
    assert schedule_complete.judge(evidence).status == "violated"


def test_where_everything_is_frozen_every_stage_is_taken_as_trained():
    rows = (("0F0", "0SEND_F0", "0B0"), ("1RECV_F0", "1F0", "1B0"))
    case = Case(topology=Topology.of(pp=2), split=(1, 3), frozen=(0, 1, 2, 3))
    assert schedule_complete.judge(Evidence("literal", case, Promises(), schedule=rows)).status == "violated"


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ((("0F0", "0F0", "0B0"),), "0F0 occurs 2 times"),
        ((("0F0", "0B0", "0F1", "0B1"),), "0F1 at rank 0, column 2: there is no microbatch 1"),
        ((("0F0", "0B0", "1F0"), ("1F0", "1B0")), "1F0 occurs 2 times"),
        ((("0F0", "0SEND_F0", "0B0"), ("1F0", "1B0", "1SEND_B0")), "has no"),
    ],
)
def test_what_is_too_much_is_named(rows, named):
    evidence = Evidence("literal", Case(topology=Topology.of(pp=len(rows))), Promises(), schedule=rows)
    problems = [violation.what for violation in schedule_complete.judge(evidence).violations]
    assert any(named in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ((("0B0", "0F0"),), "0B0 at rank 0, column 0 comes before 0F0 at rank 0, column 1"),
        ((("0F0", "0W0", "0I0"),), "0W0 at rank 0, column 1 comes before 0I0"),
        ((("0F0", "0B0", "0RECV_B0"), ("1F0", "1B0", "1SEND_B0")), "0B0 at rank 0, column 1 comes before 0RECV_B0"),
        ((("0SEND_F0", "0F0", "0B0"), ("1RECV_F0", "1F0", "1B0")), "0SEND_F0 at rank 0, column 0 comes before 0F0"),
        ((("(0F0;0B0)OVERLAP_F_B",),), "0B0 at rank 0, column 0 is done together with 0F0"),
    ],
)
def test_what_comes_too_early_is_named(rows, named):
    evidence = Evidence("literal", Case(topology=Topology.of(pp=len(rows))), Promises(), schedule=rows)
    (violation,) = schedule_ordered.judge(evidence).violations
    assert violation.what.startswith(named)


@given(families, st.integers(1, 5), st.integers(1, 6), st.sampled_from(list(LOWERINGS)))
def test_right_schedules_are_complete_and_ordered(name, stages, microbatches, how):
    evidence = recorded(name, stages, microbatches, how=how)
    assert [judged.judge(evidence).status for judged in (schedule_complete, schedule_ordered)] == ["holds"] * 2


def test_a_declared_lowering_that_does_not_exist_is_no_reason_to_skip():
    declared = replace(recorded("1f1b", 2, 2), promises=Promises(lowering="carrier"))
    verdict = schedule_deadlock_free.judge(declared)
    assert verdict.status == "unknown"
    assert verdict.reason.startswith("lowering 'carrier': expected one of receive-first, ")


def test_a_stage_on_two_ranks_is_incomplete_and_leaves_nothing_to_run():
    rows = (("0F0", "0SEND_F0", "0RECV_B0", "0B0"), ("1RECV_F0", "1F0", "1B0", "1SEND_B0", "0F0"))
    evidence = Evidence("literal", Case(topology=Topology.of(pp=2)), Promises(), schedule=rows)
    assert schedule_complete.judge(evidence).status == "violated"
    assert schedule_deadlock_free.judge(evidence).status == "not applicable"


def told(*stages, split=None, ranks=2):
    case = Case(topology=Topology.of(pp=len(stages)), split=split)
    return Evidence("literal", case, Promises(), layers=(stages,) * ranks)


def test_the_largest_stage_is_named_beside_what_the_best_split_has():
    verdict = schedule_balanced.judge(told((1.0, 10.0, 10.0), (1.0,)))
    assert verdict.status == "violated"
    (violation,) = verdict.violations
    assert (violation.stage, violation.expected, violation.observed) == (
        0,
        "11, as with 2+2 layers",
        "21, with 3+1 layers",
    )


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.data())
def test_the_best_split_holds_and_no_other_with_a_larger_stage_does(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    places = st.sets(st.integers(1, max(1, len(costs) - 1)), min_size=stages - 1, max_size=stages - 1)
    cuts = sorted(data.draw(places))
    for split in (best_split(costs, stages), tuple(b - a for a, b in pairwise([0, *cuts, len(costs)]))):
        edges = [0, *accumulate(split)]
        found = schedule_balanced.judge(told(*(tuple(costs[a:b]) for a, b in pairwise(edges))))
        least = max(map(sum, (costs[a:b] for a, b in pairwise([0, *accumulate(best_split(costs, stages))]))))
        largest = max(sum(costs[a:b]) for a, b in pairwise(edges))
        if largest > least * (1 + 1e-9):
            assert found.status == "violated"
        elif largest <= least:
            assert found.status == "holds"


def test_ranks_that_disagree_about_costs_are_named():
    evidence = replace(told((1.0,), (1.0,)), layers=(((1.0,), (1.0,)), ((1.0,), (2.0,))))
    (violation,) = schedule_balanced.judge(evidence).violations
    assert (violation.rank, violation.observed) == (1, "1 | 2")


def test_a_split_that_the_case_prescribes_is_not_the_target_s():
    verdict = schedule_balanced.judge(told((1.0, 9.0), (1.0,), split=(2, 1)))
    assert (verdict.status, verdict.reason) == ("not applicable", "the case prescribes the split 2+1")


@pytest.mark.parametrize("judged", JUDGES)
def test_evidence_without_a_schedule_is_refused(judged):
    with pytest.raises(LookupError, match="schedule was not recorded"):
        list(judged.function(Evidence("literal", Case(), Promises())))


@pytest.mark.parametrize("judged", [schedule_bubble, schedule_activations])
def test_schedules_without_closed_forms_do_not_apply(judged):
    evidence = replace(recorded("gpipe", 1, 1), case=Case(schedule="homemade"))
    assert judged.judge(evidence).status == "not applicable"
