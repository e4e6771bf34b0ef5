"""loss.finite, judged on literal evidence; no processes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Case, Save, Step, Topology
from invariants.catalog.loss_finite import loss_finite
from invariants.evidence import Evidence, Loss
from invariants.target import Promises

TOLERANCE = 1e-6


def judge(*losses, ranks=1, steps=1):
    case = Case(topology=Topology.of(pp=ranks), history=(Step(), Save(), *(Step(),) * (steps - 1)))
    return loss_finite.judge(Evidence("literal", case, Promises(), losses=losses))


def loss(reported, rank=0, step=1, reference=2.0, finite=True):
    return Loss(rank, step, reported, reference, TOLERANCE, finite)


@pytest.mark.parametrize(
    ("reported", "status"),
    [
        (2.0, "holds"),
        (2.0 + TOLERANCE / 2, "holds"),
        (2.0 - TOLERANCE * 2, "violated"),
        (2.0 + TOLERANCE * 2, "violated"),
        (0.0, "violated"),
        (-1.0, "violated"),
        (math.nan, "violated"),
        (math.inf, "violated"),
        (-math.inf, "violated"),
        (None, "violated"),
    ],
)
def test_one_rank_and_one_step(reported, status):
    assert judge(loss(reported)).status == status


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_ranks_that_do_not_know_are_silent_while_one_does(ranks, steps, data):
    knows = {step: data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for step in range(1, steps + 1)}
    losses = [loss(2.0 if rank in knows[step] else None, rank, step) for step in knows for rank in range(ranks)]
    assert judge(*losses, ranks=ranks, steps=steps).status == "holds"


def test_a_step_whose_loss_nobody_knows_is_named():
    losses = [loss(2.0, 0, 1), loss(None, 1, 1), loss(None, 0, 2), loss(None, 1, 2)]
    (violation,) = judge(*losses, ranks=2, steps=2).violations
    assert (violation.step, violation.rank, violation.observed) == (2, None, "None on every rank")


def test_nan_on_one_rank_of_the_last_step():
    losses = [loss(math.nan if (rank, step) == (1, 3) else 2.0, rank, step) for step in (1, 2, 3) for rank in (0, 1)]
    (violation,) = judge(*losses, ranks=2, steps=3).violations
    assert (violation.rank, violation.step, violation.observed) == (1, 3, "nan")


def test_parameters_that_are_not_finite_count_where_the_loss_is_not_known():
    verdict = judge(loss(2.0), loss(None, 1, finite=False), ranks=2)
    (violation,) = verdict.violations
    assert (violation.rank, violation.what, violation.observed) == (1, "parameters after the step", "NaN or infinity")


def test_no_number_is_within_the_tolerance_of_a_reference_that_is_none():
    verdict = judge(loss(2.0, reference=math.nan))
    assert verdict.status == "violated"
    assert verdict.worst.excess == math.inf


def test_a_tolerance_of_zero_asks_for_the_same_number():
    exact = replace(loss(2.0), tolerance=0.0)
    assert judge(exact).status == "holds"
    assert judge(replace(exact, reported=math.nextafter(2.0, 3))).status == "violated"


def test_the_worst_is_the_one_furthest_from_the_reference():
    verdict = judge(loss(2.1, step=1), loss(0.0, step=2), steps=2)
    assert (verdict.first.step, verdict.worst.step) == (1, 2)
    assert verdict.worst.excess == pytest.approx(2.0 / TOLERANCE)


@pytest.mark.parametrize("losses", [(), (loss(2.0),), (loss(2.0), loss(2.0, 1), loss(2.0, 0, 2))])
def test_what_was_not_recorded_is_unknown_and_no_pass(losses):
    verdict = judge(*losses, ranks=2, steps=2)
    assert verdict.status == "unknown"
    assert "loss of rank and step" in verdict.reason
