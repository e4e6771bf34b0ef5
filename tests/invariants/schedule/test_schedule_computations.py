"""Packing: every computation once, in order, with the cells that it belongs to; both ways the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.schedule.actions import Action, Batch, Op, Overlap, actions_of
from invariants.schedule.compiled import OFF, available
from invariants.schedule.computations import computations
from invariants.schedule.costs import Costs, ticks
from invariants.schedule.families import generate
from invariants.schedule.simulation import run
from invariants.schedule.table import CODES, Schedule

MICROBATCHES = st.integers(0, 5)


def cells(stages):
    computing = st.builds(Action, stages, st.sampled_from([op for op in Op if op.computes]), MICROBATCHES)
    messages = st.builds(Action, stages, st.sampled_from([op for op in Op if op.exchanges]), MICROBATCHES)
    return st.one_of(
        computing,
        messages,
        st.builds(Action, stages, st.sampled_from([op for op in Op if op.shards])),
        st.builds(Batch, st.lists(messages, min_size=1, max_size=3).map(tuple)),
        st.builds(Overlap, st.lists(computing, min_size=1, max_size=3).map(tuple)),
    )


@st.composite
def rows(draw):
    """Rows of anything; stage s is on rank s modulo the number of ranks."""
    ranks = draw(st.integers(0, 3))
    places = [st.integers(0, 2).map(lambda turn, rank=rank: rank + turn * ranks) for rank in range(ranks)]
    return tuple(tuple(draw(st.lists(cells(stages), max_size=6))) for stages in places)


@pytest.fixture(params=["compiled", "numpy"])
def way(request, monkeypatch):
    """Both ways to the same answers."""
    if request.param == "numpy":
        monkeypatch.setenv(OFF, "1")
    else:
        assert available(), "numba belongs to the development environment"


@pytest.mark.usefixtures("way")
@given(rows())
def test_what_is_packed_is_what_computes(rows):
    schedule = Schedule.of_rows(rows)
    work = computations(schedule)
    computing = [[cell for cell in row if actions_of(cell)[0].op.computes] for row in rows]
    flat = [(action, place == 0) for row in computing for cell in row for place, action in enumerate(actions_of(cell))]
    entry, mask = work.code >> 3, (1 << work.bits) - 1
    assert (work.code & 3).tolist() == [CODES[action.op] for action, _ in flat]
    assert ((work.code & 4) != 0).tolist() == [begins for _, begins in flat]
    assert (entry >> work.bits).tolist() == [action.stage for action, _ in flat]
    assert (entry & mask).tolist() == [action.microbatch for action, _ in flat]
    assert np.diff(work.offsets).tolist() == [sum(len(actions_of(cell)) for cell in row) for row in computing]
    held = {action.stage for action, _ in flat}
    assert work.home.tolist() == [stage % len(rows) if stage in held else -1 for stage in range(schedule.stages)]
    counts = np.zeros_like(work.counts)
    for action, _ in flat:
        counts[CODES[action.op], action.stage] += 1
    assert np.array_equal(work.counts, counts)


@pytest.mark.usefixtures("way")
def test_wide_codes_give_the_same_times():
    work = computations(generate("dualpipe-v", 3, 6))
    wide = work._replace(code=work.code.astype(np.int64))
    prices = ticks(Costs(overlapped=2, latency=1), work)
    for one, other in zip(run(work, prices, hold=False), run(wide, prices, hold=False), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 1], [0, 3], [0, 0], [0, 0]), "stage 0 computes on rank 0 and on rank 1"),
        (
            ([2], [0, 0], [0, 0], [0, -1]),
            "rank 0, action 1 computes on stage 0, microbatch -1: expected 0 or more",
        ),
        (([0, 1], [1], [-1], [3]), "rank 1, action 0 computes on stage -1, microbatch 3"),
        (([2], [0, 0], [0, 9], [0, 999999]), "10 stages x 1000000 microbatches, but 2 actions"),
    ],
)
def test_what_cannot_be_run_is_refused(columns, message):
    with pytest.raises(UsageError, match=message):
        computations(Schedule.of_arrays(*columns))
