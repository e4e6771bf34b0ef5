"""Traces: what Perfetto opens, judged by the rules of the format."""

import io
import json
from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from invariants.report.schedule_chart import Chart
from invariants.report.schedule_trace import UNIT_US, write_trace
from invariants.schedule.costs import Costs
from invariants.schedule.families import FAMILIES, generate
from invariants.schedule.table import Schedule
from invariants.schedule.timeline import simulate


def strict(text):
    """JSON without NaN and without a key twice."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    def once(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def traced(charts, about=None):
    file = io.StringIO()
    write_trace(file, charts, about or {})
    return strict(file.getvalue())


def check(document):
    """The rules of the Trace Event Format for what is used of it; the slices by thread."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices = defaultdict(list)
    names = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in names
            assert set(event["args"]) == {"sort_index" if event["name"].endswith("index") else "name"}
        elif event["ph"] == "C":
            assert event["ts"] >= 0
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event))
    for thread in slices.values():
        thread.sort(key=lambda each: (each[0], -each[1]))
        for (start, end, _), (later, last, _) in pairwise(thread):
            assert later >= end or (later >= start and last <= end), "slices of a thread nest or follow each other"
    return slices


@given(
    st.sampled_from(list(FAMILIES)),
    st.integers(1, 4),
    st.integers(0, 6),
    st.builds(Costs, *[st.sampled_from([0, 1, 2, "0.1"]).map(float) for _ in range(3)]),
)
def test_each_computation_is_a_slice_of_its_rank(name, ranks, more, costs):
    schedule = generate(name, ranks, max(1, FAMILIES[name].least * ranks) + more)
    timeline = simulate(schedule, costs)
    slices = check(traced([Chart.of(name, name, timeline)]))
    for rank in range(ranks):
        found = [each for _, _, each in slices[0, rank]]
        actions = [
            schedule.action(index) for index in timeline.index[timeline.offsets[rank] : timeline.offsets[rank + 1]]
        ]
        assert sorted((each["name"], each["args"]["stage"]) for each in found) == sorted(
            (f"{action.op.value}{action.microbatch}", action.stage) for action in actions
        )
        ends = [end for _, end, _ in slices[0, rank]]
        assert max(ends) <= float(timeline.makespan) * UNIT_US + 1e-6


@given(st.integers(1, 4), st.integers(1, 9))
def test_a_counter_a_rank_says_what_it_holds(ranks, microbatches):
    document = traced([Chart.of("1f1b", "1f1b", simulate(generate("1f1b", ranks, microbatches)))])
    for rank in range(ranks):
        values = [
            event["args"]["microbatches"]
            for event in document["traceEvents"]
            if event["name"] == f"in flight, rank {rank}"
        ]
        assert max(values) == min(microbatches, ranks - rank)
        assert values[-1] == 0


def test_times_that_are_whole_are_written_so():
    document = traced([Chart.of("gpipe", "gpipe", simulate(generate("gpipe", 1, 1)))])
    (forward, backward) = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert forward == {
        "name": "F0",
        "cat": "forward",
        "ph": "X",
        "ts": 0,
        "dur": 1000,
        "pid": 0,
        "tid": 0,
        "args": {"stage": 0, "microbatch": 0},
    }
    assert (backward["ts"], backward["dur"]) == (1000, 2000)


def test_several_schedules_are_several_processes_and_what_is_said_goes_along():
    charts = [
        Chart.of(name, f'{name} "quoted" \\ é', simulate(generate(name, 2, 3))) for name in ("gpipe", "1f1b", "zb-h1")
    ]
    document = traced(charts, {"verdicts": {"gpipe": "holds"}})
    assert {pid for pid, _ in check(document)} == {0, 1, 2}
    assert document["otherData"]["verdicts"] == {"gpipe": "holds"}
    titles = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert titles == [chart.title for chart in charts]


def test_a_schedule_without_computations_is_a_trace_without_slices():
    document = traced([Chart.of("idle", "idle", simulate(Schedule.of_rows([(), ()])))])
    assert not check(document)
    assert traced([]) == {"displayTimeUnit": "ms", "otherData": document["otherData"], "traceEvents": []}
