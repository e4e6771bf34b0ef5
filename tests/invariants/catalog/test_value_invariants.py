"""The invariants of values, judged on literal evidence; no processes."""

import math
from dataclasses import replace

import pytest

from invariants.case import Case, Topology
from invariants.catalog.gradients_reference import gradients_reference
from invariants.catalog.parameters_reference import parameters_reference
from invariants.catalog.replicas_agree import replicas_agree
from invariants.evidence import Deviation, Evidence, Print, Snapshot
from invariants.target import Promises

CASE = Case(topology=Topology.of(pp=1, dp=2))
EVIDENCE = Evidence("literal", CASE, Promises())


def snapshot(rank, step, digest, loaded=False, norm=1.0, lo=0, hi=4, name="w"):
    return Snapshot(rank, step, loaded, (Print(name, lo, hi, "float32", digest, norm),))


def test_replicas_of_the_same_bits_agree_though_they_change_over_steps():
    points = [snapshot(rank, step, f"bits{step}") for step in range(3) for rank in range(2)]
    assert replicas_agree.judge(replace(EVIDENCE, replicas=tuple(points))).status == "holds"


@pytest.mark.parametrize("loaded", [False, True])
def test_a_permutation_of_equal_norm_is_no_replica(loaded):
    points = (snapshot(0, 2, "ab", loaded), snapshot(1, 2, "ba", loaded))
    verdict = replicas_agree.judge(replace(EVIDENCE, replicas=points))
    assert verdict.status == "violated"
    assert (verdict.first.rank, verdict.first.step, verdict.first.tensor) == (1, 2, "w")
    assert ("after a load" in verdict.first.what) == loaded


def test_other_elements_other_names_and_a_loaded_state_are_no_replicas():
    points = (
        snapshot(0, 1, "a"),
        snapshot(1, 1, "b", lo=4, hi=8),
        snapshot(1, 1, "c", name="v"),
        snapshot(1, 1, "d", loaded=True),
    )
    assert replicas_agree.judge(replace(EVIDENCE, replicas=points)).status == "holds"


def deviation(error, tolerance=1e-6, **more):
    return replace(Deviation("w", 1, 0, 3, 1.0, 1.0 + error, error, tolerance), **more)


JUDGES = [
    (gradients_reference, {"gradients": ()}, "gradients"),
    (parameters_reference, {"updates": ()}, "updates"),
    (parameters_reference, {"updates": (deviation(0.0),), "trajectory": ()}, "trajectory"),
]


@pytest.mark.parametrize(("judge", "recorded", "section"), JUDGES)
@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (deviation(1e-6), "holds"),
        (deviation(math.nextafter(1e-6, 1)), "violated"),
        (deviation(math.nan), "violated"),
        (deviation(math.inf), "violated"),
        (deviation(0.0, 0.0), "holds"),
        (deviation(1e-300, 0.0), "violated"),
        (deviation(1.0, missing=True), "violated"),
        (deviation(1.0, missing=True, rank=-1), "violated"),
        (deviation(0.0, missing=True, expected=0.0), "holds"),
    ],
)
def test_deviations_from_both_sides_of_the_tolerance(judge, recorded, section, seen, status):
    assert judge.judge(replace(EVIDENCE, **{**recorded, section: (seen,)})).status == status


@pytest.mark.parametrize(
    ("judge", "section"),
    [(replicas_agree, "replicas"), (gradients_reference, "gradients"), (parameters_reference, "updates")],
)
def test_nothing_recorded_is_no_pass(judge, section):
    verdict = judge.judge(replace(EVIDENCE, **{section: ()}))
    assert verdict.status == "unknown"
    assert "nothing was recorded" in verdict.reason


def test_the_worst_is_the_one_furthest_beyond_its_own_tolerance():
    seen = (deviation(1e-3, 1e-4), deviation(1e-5, 1e-9, name="v", step=2))
    verdict = gradients_reference.judge(replace(EVIDENCE, gradients=seen))
    assert (verdict.first.tensor, verdict.worst.tensor) == ("w", "v")
