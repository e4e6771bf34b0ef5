"""collectives.agree, p2p.paired and buffers.stable, judged on literal evidence; no processes."""

from dataclasses import replace

import pytest

from invariants import codec
from invariants.case import Case, Save, Step, Topology
from invariants.catalog.buffers_stable import buffers_stable
from invariants.catalog.collectives_agree import collectives_agree
from invariants.catalog.p2p_paired import p2p_paired
from invariants.communication import CHANGED, RECV, SEND, UNWRITTEN, Operation
from invariants.conformance import check_invariant
from invariants.evidence import Evidence, Posted
from invariants.target import Promises

CASE = Case(topology=Topology.of(pp=2, dp=1), history=(Step(1), Save(), Step(1)))
ALL = (collectives_agree, p2p_paired, buffers_stable)
TENSOR = {"dtype": "float32", "shape": (2,), "tensors": 1, "bytes": 8}


def reduced(rank, turn, **options):
    return Operation(rank, 2 * turn - 2, "all_reduce", "0", (0, 1), turn, **{**TENSOR, "reduction": "sum", **options})


def message(rank, turn, **options):
    kind = RECV if rank else SEND
    options = {"peer": 1 - rank, "completed": 9.0, **TENSOR, **options}
    return Operation(rank, 2 * turn - 1, kind, "0", (0, 1), turn, **options)


def evidence(*changed, steps=(1, 2), resumed=(2,), case=CASE):
    """Each rank reduces and sends once a step; `changed` takes the place of what has its rank, run and number."""
    rows = []
    for rank in range(2):
        for after_load, done in ((False, steps), (True, resumed)):
            rows.append(Posted(rank, 0, False, after_load, ()))
            for turn, step in enumerate(done, 1):
                own = (reduced(rank, turn), message(rank, turn))
                for loaded, operation in changed:
                    if loaded is after_load and operation.rank == rank:
                        own = tuple(operation if each.number == operation.number else each for each in own)
                rows.append(Posted(rank, step, True, after_load, own))
    return Evidence("literal", case, Promises(), communication=tuple(rows))


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("invariant", "operation", "expected", "observed"),
    [
        (
            collectives_agree,
            reduced(1, 1, reduction="max"),
            "on rank 0: all_reduce of float32[2], sum",
            "[2], max over",
        ),
        (p2p_paired, message(1, 1, shape=(3,), bytes=12), "on rank 0: send of float32[2] to", "recv of float32[3]"),
        (buffers_stable, message(1, 1, flags=UNWRITTEN), "a full buffer", "its end was not written"),
        (buffers_stable, message(0, 1, flags=CHANGED), "the bytes that were posted", "others"),
    ],
)
def test_a_violation_names_rank_step_run_and_both_sides(invariant, operation, expected, observed, loaded):
    verdict = invariant.judge(evidence((loaded, operation)))
    assert verdict.status == "violated"
    (found,) = verdict.violations
    assert (found.rank, found.step) == (operation.rank, 2 if loaded else 1)
    assert expected in found.expected
    assert observed in found.observed
    assert ("after a load" in found.what) is loaded
    broken, healthy = evidence((loaded, operation)), evidence()
    check_invariant(invariant, holds=[healthy, evidence(resumed=())], violated=[broken])
    assert {other.judge(broken).status for other in ALL if other is not invariant} == {"holds"}


def test_a_violation_outside_of_a_step_says_so():
    healthy = evidence(resumed=())
    for step, words in ((0, "while it was built"), (1, "after the step")):
        rows = tuple(
            replace(row, operations=(*row.operations, reduced(row.rank, 9, peer=row.rank)))
            if (row.step, row.inside) == (step, False)
            else row
            for row in (*healthy.communication, *(Posted(rank, 1, False, False, ()) for rank in range(2)))
        )
        (found,) = collectives_agree.judge(replace(healthy, communication=rows)).violations
        assert words in found.what
        assert (found.rank, found.step) == (1, step)


@pytest.mark.parametrize("invariant", ALL, ids=lambda invariant: invariant.id)
@pytest.mark.parametrize("steps", [(), (1,)])
def test_a_step_that_was_not_recorded_leaves_it_unknown(invariant, steps):
    verdict = invariant.judge(evidence(steps=steps, resumed=()))
    assert verdict.status == "unknown"
    assert "communication of rank and step (0, " in verdict.reason
    lost = replace(evidence(), communication=None, lost={"communication": "rank 1 died: killed by SIGABRT"})
    assert invariant.judge(lost).reason == "rank 1 died: killed by SIGABRT"


def test_a_rank_that_was_not_recorded_leaves_it_unknown():
    whole = evidence()
    for rank in range(2):
        rows = tuple(row for row in whole.communication if row.rank != rank)
        assert {each.judge(replace(whole, communication=rows)).status for each in ALL} == {"unknown"}


@pytest.mark.parametrize("invariant", ALL, ids=lambda invariant: invariant.id)
def test_one_rank_has_nobody_to_agree_with(invariant):
    alone = Evidence("literal", replace(CASE, topology=Topology.of(pp=1, dp=1)), Promises(), communication=())
    verdict = invariant.judge(alone)
    assert (verdict.status, verdict.reason) == ("not applicable", "one rank, which sends nothing to others")


def test_ranks_that_only_reduce_have_no_messages_and_the_other_way_round():
    whole = evidence()

    def only(kinds):
        rows = (replace(row, operations=tuple(each for each in row.operations if each.kind in kinds)) for row in rows_)
        return replace(whole, communication=tuple(rows))

    rows_ = whole.communication
    assert [each.judge(only({"all_reduce"})).status for each in ALL] == ["holds", "not applicable", "not applicable"]
    assert [each.judge(only({SEND, RECV})).status for each in ALL] == ["not applicable", "holds", "holds"]


@pytest.mark.parametrize(
    ("options", "why"), [({"completed": 0.0}, "nobody waited for it"), ({"device": "cuda"}, "buffers on cuda are not")]
)
def test_buffers_that_nobody_saw_the_end_of_leave_it_unknown_where_none_is_known_to_be_wrong(options, why):
    unseen = (False, message(0, 1, **options))
    verdict = buffers_stable.judge(evidence(unseen))
    assert verdict.status == "unknown"
    assert f"rank 0's send of float32[2] to rank 1: {why}" in verdict.reason
    assert buffers_stable.judge(evidence(unseen, (True, message(0, 1, flags=CHANGED)))).status == "violated"


def test_both_flags_of_one_operation_are_two_violations():
    verdict = buffers_stable.judge(evidence((False, message(0, 1, flags=CHANGED | UNWRITTEN))))
    assert len(verdict.violations) == 2


def test_operations_are_stored_as_they_are():
    special = message(0, 1, splits=((1, 2), ()), label="F, microbatch 2", source="a.py:3", tag=4, flags=3, batch=2)
    whole = evidence((False, special))
    assert codec.loads(codec.dumps(whole)) == whole
