"""The invariants of values, judged on literal evidence; no processes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("lo", "hi"), [(0, 3), (1, 4), (3, 8), (1, 3), (0, 8)], ids=["start", "end", "across", "inside", "around"]
)
@pytest.mark.parametrize("other", [0, 1], ids=["first", "last"])
def test_pieces_that_overlap_otherwise_leave_it_unknown(lo, hi, other):
    points = [snapshot(1 - other, 1, "a"), snapshot(other, 1, "b", lo=lo, hi=hi)]
    verdict = replicas_agree.judge(replace(EVIDENCE, replicas=tuple(points)))
    assert verdict.status == "unknown"
    for words in ("w, step 1", f"elements 0 to 3 on rank {1 - other}", f"elements {lo} to {hi - 1} on rank {other}"):
        assert words in verdict.reason


def test_the_ranks_of_each_range_are_named():
    points = (snapshot(0, 1, "a"), snapshot(1, 1, "a"), snapshot(2, 1, "b", lo=2, hi=6))
    verdict = replicas_agree.judge(replace(EVIDENCE, replicas=points))
    assert "elements 0 to 3 on ranks 0, 1 and elements 2 to 5 on rank 2 overlap" in verdict.reason


def test_replicas_that_differ_are_told_though_others_cannot_be_compared():
    points = (snapshot(0, 1, "a"), snapshot(1, 1, "b"), snapshot(1, 1, "c", lo=2, hi=6))
    assert replicas_agree.judge(replace(EVIDENCE, replicas=points)).status == "violated"


def test_shards_that_touch_are_empty_or_overlap_in_other_steps_agree():
    points = (
        snapshot(0, 1, "a"),
        snapshot(1, 1, "b", lo=4, hi=8),
        snapshot(1, 1, "", lo=2, hi=2),
        snapshot(0, 2, "a", lo=2, hi=6),
    )
    assert replicas_agree.judge(replace(EVIDENCE, replicas=points)).status == "holds"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_any_overlap_is_found_and_nothing_else(pieces):
    points = tuple(snapshot(rank, 1, "a", lo=min(ends), hi=max(ends)) for rank, *ends in pieces)
    ranges = {(min(ends), max(ends)) for _, *ends in pieces if ends[0] != ends[1]}
    overlap = any(max(a[0], b[0]) < min(a[1], b[1]) for a in ranges for b in ranges if a != b)
    expected = "unknown" if overlap else "holds"
    assert replicas_agree.judge(replace(EVIDENCE, replicas=points)).status == expected


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
