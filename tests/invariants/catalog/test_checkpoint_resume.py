"""checkpoint.resume, and what it shares with checkpoint.identical, judged on literal evidence; no processes."""

import math
from dataclasses import replace

import pytest

from invariants.case import Case, Save, Step, Topology
from invariants.catalog.checkpoint_identical import checkpoint_identical
from invariants.catalog.checkpoint_resume import checkpoint_resume
from invariants.evidence import Deviation, Evidence, Loss, Print, Resume, Snapshot
from invariants.target import Promises

CASE = Case(topology=Topology.of(dp=2), history=(Step(), Save(), Step(), Step()))
WEIGHT = Print("w", 0, 4, "float32", "aa", 1.0)


@pytest.mark.parametrize("judged", [checkpoint_identical, checkpoint_resume])
def test_evidence_without_the_section_is_refused(judged):
    with pytest.raises(LookupError, match="was not recorded"):
        list(judged.function(Evidence("literal", CASE, Promises())))


def test_neither_applies_where_nothing_is_saved():
    evidence = Evidence("literal", Case(), Promises())
    for judged in (checkpoint_identical, checkpoint_resume):
        verdict = judged.judge(evidence)
        assert (verdict.status, verdict.reason) == ("not applicable", "the history saves nothing")


@pytest.mark.parametrize(("after", "status"), [(0, "not applicable"), (1, "not applicable"), (2, "holds")])
def test_a_resumed_run_is_judged_from_two_steps_on(after, status):
    verdict = resumed(runs(after), runs(after), after=after)
    assert verdict.status == status
    assert status == "holds" or f"steps after the save: {after}" in verdict.reason


def runs(after=2, **changed):
    """Snapshots of two ranks after a save at step 1; `changed` gives other bits to a rank's step, `r1s2="xx"`."""
    return tuple(
        Snapshot(rank, step, True, (replace(WEIGHT, digest=changed.get(f"r{rank}s{step}", f"{rank}.{step}")),))
        for step in range(2, 2 + after)
        for rank in (0, 1)
    )


def resumed(
    uninterrupted, again, *, after=2, promise="bitwise", deviations=(), losses=(), losses_before=None, **recorded
):
    """`losses_before` and `recorded` are sections of the uninterrupted run."""
    case = replace(CASE, history=(Step(), Save(), *(Step(),) * after))
    resume = Resume(uninterrupted, again, deviations, losses)
    promises = Promises(resume=promise)
    evidence = Evidence("literal", case, promises, resume=resume, losses=losses_before, **recorded)
    return checkpoint_resume.judge(evidence)


@pytest.mark.parametrize("step", [2, 3])
def test_other_bits_after_a_further_step(step):
    (violation,) = resumed(runs(), runs(**{f"r1s{step}": "xx"})).violations
    assert (violation.rank, violation.step, violation.tensor) == (1, step, "w")
    assert violation.what == "parameter of the resumed run, elements 0 to 3"


def test_points_up_to_the_save_are_not_compared():
    before = tuple(replace(WEIGHT, digest=digest) for digest in ("before", "after"))
    early = [Snapshot(0, 1, loaded, (piece,)) for loaded, piece in zip((False, True), before, strict=True)]
    assert resumed((early[0], *runs()), (early[1], *runs())).status == "holds"


@pytest.mark.parametrize(("left", "right"), [((), ()), (runs(1), runs()), (runs(), runs(1)), (runs()[:3], runs())])
def test_a_step_without_a_snapshot_is_unknown(left, right):
    assert resumed(left, right).status == "unknown"


def deviation(step, error, name="w", missing=False):
    return Deviation(name, step, 0, 3, 1.0, 1.0 + error, error, 1e-6, missing=missing, resumed=True)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (deviation(3, 1e-6), "holds"),
        (deviation(3, 1e-5), "violated"),
        (deviation(3, math.nan), "violated"),
        (deviation(3, 1.0, missing=True), "violated"),
        (deviation(2, 0.0, name="v"), "unknown"),
    ],
)
def test_without_a_promise_of_bits_the_tolerance_rule_decides(last, status):
    differing = runs(r0s3="last bit")
    verdict = resumed(runs(), differing, promise="tolerance", deviations=(deviation(2, 0.0), last))
    assert verdict.status == status
    assert status != "violated" or verdict.first.step == 3


def test_deviations_do_not_excuse_other_bits():
    within = (deviation(2, 0.0), deviation(3, 0.0))
    assert resumed(runs(), runs(r0s3="x"), deviations=within).status == "violated"


WITHIN = (deviation(2, 0.0), deviation(3, 0.0))
PLACES = [(rank, step) for step in (2, 3) for rank in (0, 1)]


def loss(rank, step, reported=2.0, reference=2.0, tolerance=0.0, finite=True):
    return Loss(rank, step, reported, reference, tolerance, finite)


def reported(*changed, **common):
    """Losses of both ranks after the save, `changed` ones in their places."""
    found = {place: loss(*place, **common) for place in PLACES}
    return tuple({**found, **{(each.rank, each.step): each for each in changed}}.values())


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({}, "holds"),
        ({"reported": math.nextafter(2.0, 3.0)}, "violated"),
        ({"reported": None}, "violated"),
        ({"reported": None, "reference": math.nan}, "holds"),
        ({"reference": math.nan}, "violated"),
        ({"reported": math.nan}, "violated"),
        ({"reported": math.nan, "reference": math.nan}, "violated"),
        ({"reported": math.inf, "reference": math.inf}, "violated"),
        ({"finite": False}, "violated"),
    ],
)
def test_losses_of_a_resumed_run_are_the_same_bits(last, status):
    verdict = resumed(runs(), runs(), losses=reported(loss(1, 3, **last)))
    assert verdict.status == status
    assert status == "holds" or {(v.rank, v.step) for v in verdict.violations} == {(1, 3)}
    assert all("of the resumed run" in violation.what for violation in verdict.violations)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({"reported": 2.0 + 1e-7}, "holds"),
        ({"reported": 2.0 + 1e-5}, "violated"),
        ({"reported": None}, "holds"),
        ({"reported": math.nan}, "violated"),
        ({"finite": False}, "violated"),
    ],
)
def test_losses_of_a_resumed_run_are_the_references_without_a_promise_of_bits(last, status):
    losses = reported(loss(1, 3, **{"tolerance": 1e-6, **last}), tolerance=1e-6)
    assert resumed(runs(), runs(), promise="tolerance", deviations=WITHIN, losses=losses).status == status


def test_a_step_whose_loss_nobody_knows_after_the_load():
    losses = reported(loss(0, 3, None), loss(1, 3, None))
    (violation,) = resumed(runs(), runs(), promise="tolerance", deviations=WITHIN, losses=losses).violations
    assert (violation.step, violation.observed) == (3, "None on every rank")


@pytest.mark.parametrize("promise", ["bitwise", "tolerance"])
def test_a_step_without_a_loss_is_unknown(promise):
    assert resumed(runs(), runs(), promise=promise, deviations=WITHIN, losses=reported()[:-1]).status == "unknown"


def test_a_loss_that_is_wrong_in_both_runs_is_not_the_loads():
    nan = loss(1, 3, math.nan, math.nan, finite=False)
    assert resumed(runs(), runs(), losses=reported(nan), losses_before=reported(nan)).status == "holds"
    wrong = reported(loss(1, 2, 0.0), loss(1, 3, 0.0))
    within = {"promise": "tolerance", "deviations": WITHIN}
    verdict = resumed(runs(), runs(), losses=wrong, losses_before=wrong, **within)
    assert (verdict.status, verdict.reason.rpartition("see ")[2]) == ("not applicable", "loss.finite")
    also = (*wrong[:2], loss(0, 3, 0.0), wrong[3])
    (violation,) = resumed(runs(), runs(), losses=also, losses_before=wrong, **within).violations
    assert (violation.rank, violation.step) == (0, 3)


def test_another_loss_than_a_wrong_one_is_found_where_bits_are_promised():
    losses = reported(loss(1, 3, 0.0, reference=1.0))
    before = reported(loss(1, 3, 1.0))
    (violation,) = resumed(runs(), runs(), losses=losses, losses_before=before).violations
    assert (violation.rank, violation.expected, violation.observed) == (1, "1.0", "0.0")


@pytest.mark.parametrize("section", ["gradients", "updates"])
@pytest.mark.parametrize(
    ("before", "status"),
    [
        ((deviation(2, 1e-5),), "not applicable"),
        ((deviation(3, math.nan),), "not applicable"),
        ((deviation(3, 1.0, missing=True),), "not applicable"),
        ((deviation(2, 1e-6), deviation(3, 0.0)), "violated"),
        ((deviation(1, 1e-5),), "violated"),
        ((deviation(2, 1e-5, name="v"),), "violated"),
        ((), "violated"),
    ],
)
def test_what_deviates_without_a_load_as_well_is_not_the_loads(section, before, status):
    uninterrupted = tuple(replace(seen, resumed=False) for seen in before)
    after = (deviation(2, 0.0), deviation(3, 1e-5))
    verdict = resumed(runs(), runs(), promise="tolerance", deviations=after, **{section: uninterrupted})
    assert verdict.status == status
    assert status == "violated" or verdict.reason == (
        "the uninterrupted run deviates from the reference as well: see gradients.reference and parameters.reference"
    )


def test_a_tensor_that_deviates_after_the_load_alone_is_told_apart():
    after = (deviation(2, 1e-5), deviation(2, 1e-5, name="v"), deviation(3, 0.0))
    verdict = resumed(runs(), runs(), promise="tolerance", deviations=after, gradients=(deviation(3, 1e-5),))
    assert [violation.tensor for violation in verdict.violations] == ["v"]


def test_right_code_holds_though_it_deviates_without_a_load():
    verdict = resumed(runs(), runs(), promise="tolerance", deviations=WITHIN, gradients=(deviation(3, 1e-5),))
    assert verdict.status == "holds"
