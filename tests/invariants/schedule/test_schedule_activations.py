"""What a stage holds at its peak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.schedule.actions import parse_rows
from invariants.schedule.activations import in_flight
from invariants.schedule.families import generate
from invariants.schedule.formulas import in_flight_bound
from invariants.schedule.lowering import LOWERINGS, lower


def test_a_forward_opens_and_a_backward_closes():
    assert in_flight(parse_rows([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]])) == {0: 2}


def test_a_split_backward_holds_until_the_weight_gradient():
    assert in_flight(parse_rows([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]])) == {0: 2}
    assert in_flight(parse_rows([["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]])) == {0: 1}


def test_stages_of_one_rank_count_apart():
    assert in_flight(parse_rows([["0F0", "0F1", "2F0", "2B0", "0B0", "0B1"], ["1F0", "1B0"], []])) == {0: 2, 2: 1, 1: 1}


def test_a_microbatch_that_is_never_closed_stays():
    assert in_flight(parse_rows([["0F0", "0F1", "0B1", "0F2", "0B2"]])) == {0: 2}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(stages=st.integers(1, 10), microbatches=st.integers(1, 20), how=st.sampled_from(["none", *LOWERINGS]))
def test_families_hold_what_their_formula_says(name, stages, microbatches, how):
    rows = generate(name, stages, microbatches)
    rows = rows if how == "none" else lower(rows, how)
    assert in_flight(rows) == {stage: in_flight_bound(name, stage, stages, microbatches) for stage in range(stages)}
