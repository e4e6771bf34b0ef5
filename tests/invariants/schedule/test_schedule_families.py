"""The orders that the generators give, as literals and as rules over the domain."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Op
from invariants.schedule.activations import in_flight
from invariants.schedule.completeness import complete
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.families.one_for_one import group_sizes
from invariants.schedule.timeline import simulate

SIZES = {"stages": st.integers(1, 12), "microbatches": st.integers(1, 24)}
CORNERS = [(1, 1), (1, 7), (2, 1), (5, 1), (5, 2), (5, 4), (5, 5), (5, 9), (5, 10), (5, 11), (3, 7), (3, 8), (8, 1)]


def texts(name, *sizes):
    return [" ".join(map(str, row)) for row in generate(name, *sizes).rows()]


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


def test_interleaved_literally():
    assert texts("interleaved-1f1b", 2, 3, 2) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ]


def megatron(ranks, microbatches, virtual, group, rank):
    """A rank's row by Megatron-LM's rule: a table of (microbatch, chunk), group by group, and a warm-up."""
    table = [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(virtual)
        for microbatch in range(first, min(first + group, microbatches))
    ]
    warmup = min(2 * (ranks - 1 - rank) + (virtual - 1) * group, len(table))
    cells = [f"{chunk * ranks + rank}F{microbatch}" for microbatch, chunk in table[:warmup]]
    for place, (microbatch, chunk) in enumerate(table):
        if warmup + place < len(table):
            late, which = table[warmup + place]
            cells.append(f"{which * ranks + rank}F{late}")
        cells.append(f"{(virtual - 1 - chunk) * ranks + rank}B{microbatch}")
    return " ".join(cells)


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 30), virtual=st.integers(1, 4))
def test_interleaved_is_megatrons_order_wherever_its_groups_may_be_these(ranks, microbatches, virtual):
    sizes = group_sizes(ranks, microbatches).tolist()
    assume(microbatches >= ranks and set(sizes[:-1]) <= {sizes[0]})
    expected = [megatron(ranks, microbatches, virtual, sizes[0], rank) for rank in range(ranks)]
    assert texts("interleaved-1f1b", ranks, microbatches, virtual) == expected


def test_zb_h1_literally():
    assert texts("zb-h1", 3, 4) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h2_literally():
    assert texts("zb-h2", 2, 4) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_zb_v_literally():
    assert texts("zb-v", 2, 3) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_dualpipe_v_literally():
    first, last = (text.replace("OVERLAP_F_B", "") for text in texts("dualpipe-v", 2, 4))
    assert first == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3"
    assert last == "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3"


def test_five_microbatches_on_two_ranks_are_a_group_of_three_and_one_of_two():
    forwards = [cell.split("F") for cell in texts("interleaved-1f1b", 2, 5, 2)[0].split() if "F" in cell]
    assert [stage for stage, _ in forwards] == ["0", "0", "0", "2", "2", "2", "0", "0", "2", "2"]
    assert [microbatch for _, microbatch in forwards] == ["0", "1", "2", "0", "1", "2", "3", "4", "3", "4"]


def test_one_stage_one_microbatch():
    assert {name: texts(name, 1, 1) for name in FAMILIES if name != "dualpipe-v"} == {
        "gpipe": ["0F0 0B0"],
        "1f1b": ["0F0 0B0"],
        "interleaved-1f1b": ["0F0 0B0"],
        "zb-h1": ["0F0 0I0 0W0"],
        "zb-h2": ["0F0 0I0 0W0"],
        "zb-v": ["0F0 1F0 1I0 1W0 0I0 0W0"],
    }


def check(name, ranks, microbatches, virtual):
    """Complete, each stage where the family puts it, and no computation waits for ever."""
    virtual = FAMILIES[name].virtual or virtual
    schedule = generate(name, ranks, microbatches, virtual)
    assert complete(schedule, virtual * ranks, microbatches) == []
    there = range(ranks)
    expected = [*there, *reversed(there)] if name in ("zb-v", "dualpipe-v") else [*there] * virtual
    assert schedule.placement.tolist() == expected
    assert simulate(schedule).busy == (3 * virtual * microbatches,) * ranks


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_complete_and_ends_at_its_corners(name):
    for ranks, microbatches in CORNERS:
        for virtual in (1, 2, 5) if FAMILIES[name].virtual is None else (1,):
            if microbatches >= FAMILIES[name].least * ranks:
                check(name, ranks, microbatches, virtual)


@pytest.mark.parametrize("name", FAMILIES)
@given(virtual=st.integers(1, 4), **SIZES)
def test_every_family_is_complete_and_ends(name, stages, microbatches, virtual):
    check(name, stages, microbatches + FAMILIES[name].least * stages, virtual)


@given(more=st.integers(1, 16), **SIZES)
def test_zb_v_of_few_microbatches_is_part_of_that_of_more(stages, microbatches, more):
    few = min(microbatches, 2 * stages - 1)
    longer = generate("zb-v", stages, min(few + more, 2 * stages - 1)).rows()
    kept = tuple(tuple(cell for cell in row if cell.microbatch < few) for row in longer)
    assert generate("zb-v", stages, few).rows() == kept


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


@given(**SIZES)
def test_one_chunk_a_rank_interleaved_runs_1f1b_with_a_longer_warmup(stages, microbatches):
    for rank, row in enumerate(generate("interleaved-1f1b", stages, microbatches).rows()):
        warmup = min(microbatches, 2 * (stages - 1 - rank))
        steady = [Op.FORWARD, Op.BACKWARD] * (microbatches - warmup)
        assert [cell.op for cell in row] == [Op.FORWARD] * warmup + steady + [Op.BACKWARD] * warmup


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_two_stages_a_rank_need_not_be_said(name):
    assert generate(name, 2, 4) == generate(name, 2, 4, 2)


def test_wrong_names_and_sizes_say_what_is_right():
    with pytest.raises(UsageError, match="schedule '2f2b': expected one of gpipe, 1f1b, interleaved-1f1b, zb-h1"):
        generate("2f2b", 2, 2)
    with pytest.raises(UsageError, match="gpipe: ranks=0: expected 1 or more"):
        generate("gpipe", 0, 2)
    with pytest.raises(UsageError, match="1f1b: microbatches=-1: expected 1 or more"):
        generate("1f1b", 2, -1)
    with pytest.raises(UsageError, match="interleaved-1f1b: virtual=0: expected 1 or more"):
        generate("interleaved-1f1b", 2, 2, 0)
    with pytest.raises(UsageError, match="zb-h1: virtual=2: expected 1, its number of stages a rank"):
        generate("zb-h1", 2, 2, 2)
    with pytest.raises(UsageError, match="zb-v: virtual=3: expected 2, its number of stages a rank"):
        generate("zb-v", 2, 2, 3)
    with pytest.raises(UsageError, match="dualpipe-v: microbatches=5 on 3 ranks: expected 6 or more, 2 a rank"):
        generate("dualpipe-v", 3, 5)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "virtual"),
    [("1f1b", 10**5, 10**5, 1), ("gpipe", 1, 10**13, 1), ("interleaved-1f1b", 1, 1, 10**11), ("zb-v", 10**6, 1, 1)],
)
def test_sizes_that_no_memory_holds_are_refused_at_once(name, ranks, microbatches, virtual):
    with pytest.raises(UsageError, match=f"{name}: ranks={ranks}, .*expected at most 2147483647"):
        generate(name, ranks, microbatches, virtual)
