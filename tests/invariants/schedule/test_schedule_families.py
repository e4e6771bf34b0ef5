"""The orders that the generators give, as literals and as rules over the domain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Op
from invariants.schedule.activations import in_flight
from invariants.schedule.completeness import complete
from invariants.schedule.families import FAMILIES, generate

SIZES = {"stages": st.integers(1, 12), "microbatches": st.integers(1, 24)}


def texts(name, stages, microbatches):
    return [" ".join(map(str, row)) for row in generate(name, stages, microbatches).rows()]


def test_gpipe_literally():
    assert texts("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_literally():
    assert texts("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages():
    assert texts("1f1b", 4, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_one_stage_one_microbatch(name):
    assert texts(name, 1, 1) == ["0F0 0B0"]


@pytest.mark.parametrize("name", FAMILIES)
@given(**SIZES)
def test_every_family_is_complete(name, stages, microbatches):
    family = FAMILIES[name]
    microbatches = max(microbatches, family.least * stages)
    assert complete(generate(name, stages, microbatches), (family.virtual or 1) * stages, microbatches) == []


@given(**SIZES)
def test_1f1b_alternates_between_its_warmup_and_its_end(stages, microbatches):
    for stage, row in enumerate(generate("1f1b", stages, microbatches).rows()):
        warmup = min(microbatches, stages - stage) - 1
        ops = [cell.op for cell in row]
        steady = [Op.FORWARD, Op.BACKWARD] * (microbatches - warmup)
        assert ops == [Op.FORWARD] * warmup + steady + [Op.BACKWARD] * warmup


@given(**SIZES)
def test_1f1b_never_holds_more_than_gpipe(stages, microbatches):
    gpipe, ours = (in_flight(generate(name, stages, microbatches)) for name in ("gpipe", "1f1b"))
    assert all(ours[stage] <= gpipe[stage] for stage in range(stages))


def test_wrong_names_and_sizes_say_what_is_right():
    with pytest.raises(UsageError, match="schedule '2f2b': expected one of gpipe, 1f1b"):
        generate("2f2b", 2, 2)
    with pytest.raises(UsageError, match="ranks=0: expected 1 or more"):
        generate("gpipe", 0, 2)
    with pytest.raises(UsageError, match="microbatches=-1: expected 1 or more"):
        generate("1f1b", 2, -1)
