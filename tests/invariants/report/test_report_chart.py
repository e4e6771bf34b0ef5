"""What is drawn of a schedule, against slow and obvious counts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.report.schedule_chart import KINDS, Chart, picked
from invariants.schedule.actions import Op
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.table import OPS, Schedule
from invariants.schedule.timeline import simulate

TIMES = st.integers(0, 3)


@st.composite
def charts(draw):
    """A family of a few ranks, at costs of which some may be 0."""
    name = draw(st.sampled_from(list(FAMILIES)))
    ranks = draw(st.integers(1, 4))
    microbatches = draw(st.integers(max(1, FAMILIES[name].least * ranks), 10))
    costs = Costs(draw(TIMES), draw(TIMES), draw(TIMES), overlapped=draw(st.none() | TIMES))
    return Chart.of(name, name, simulate(generate(name, ranks, microbatches), costs))


@given(charts())
def test_each_rank_has_its_computations_in_program_order(chart):
    where = [chart.of_rank(rank) for rank in range(chart.ranks)]
    assert [part.start for part in where] == [0, *(part.stop for part in where[:-1])]
    assert where[-1].stop == len(chart.rank)
    for rank, part in enumerate(where):
        assert (chart.rank[part] == rank).all()
        assert (np.diff(chart.start[part]) >= 0).all()
        assert sorted(set(chart.chunk[part].tolist())) == list(range(len(set(chart.stage[part].tolist()))))


@given(charts(), st.integers(1, 7))
def test_what_fills_a_column_is_the_time_of_the_computations_in_it(chart, columns):
    edges = np.linspace(0, chart.makespan or 1.0, columns + 1)
    for rank, shares in enumerate(chart.coverage(edges)):
        expected = np.zeros((len(KINDS), columns))
        part = chart.of_rank(rank)
        for op, start, end in zip(chart.op[part], chart.start[part], chart.end[part], strict=True):
            expected[KINDS.index(op)] += np.maximum(0, np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]))
        np.testing.assert_allclose(shares, expected / np.diff(edges), atol=1e-12)


@given(charts(), st.sampled_from([1.0, 0.5]))
def test_what_a_rank_holds_is_counted_at_any_time(chart, weight):
    chart = replace(chart, weight=weight)
    for rank in range(chart.ranks):
        part = chart.of_rank(rank)
        spans = {}
        for op, stage, microbatch, start, end in zip(
            *(column[part] for column in (chart.op, chart.stage, chart.microbatch, chart.start, chart.end)), strict=True
        ):
            if OPS[op] is Op.FORWARD:
                spans[stage, microbatch] = (start, np.inf)
            elif OPS[op] is not Op.INPUT_GRADIENT:
                spans[stage, microbatch] = (spans[stage, microbatch][0], end)
        times, held = chart.held(rank)
        assert (np.diff(times) > 0).all()
        for time, count in zip(times, held, strict=True):
            assert count == weight * sum(start <= time < end for start, end in spans.values())
        assert held[-1] == 0


def test_a_schedule_without_computations_is_a_chart_without_boxes():
    chart = Chart.of("idle", "idle", simulate(Schedule.of_rows([(), ()])))
    assert (chart.makespan, chart.chunks, chart.kinds) == (0.0, 0, ())
    assert [part.tolist() for part in chart.held(1)] == [[0], [0]]
    assert not chart.within((0, 1)).size


@pytest.mark.parametrize(("ranks", "most", "expected"), [(1, 1, [0]), (3, 3, [0, 1, 2]), (7, 3, [0, 3, 6])])
def test_few_of_many_ranks_are_evenly_picked(ranks, most, expected):
    assert picked(ranks, most) == expected


@given(st.integers(1, 5000), st.integers(1, 50))
def test_the_first_and_the_last_rank_are_among_those_picked(ranks, most):
    found = picked(ranks, most)
    assert found[-1] == ranks - 1
    assert ranks == 1 or found[0] == 0
    assert len(found) <= most + 1
    assert found == sorted(set(found))
