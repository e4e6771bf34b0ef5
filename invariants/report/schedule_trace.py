"""A schedule as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: for runs too large for a picture.

The format is the JSON object form of Google's Trace Event Format: `X` events with `ts` and `dur` in microseconds, `C`
events for counters, `M` events for names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

import numpy as np

from invariants.report.schedule_chart import LETTERS, MEANING, Chart

UNIT_US: Final = 1000
"""Microseconds of a trace in one unit of the costs, which have none of their own: one is shown as 1 ms."""


def write_trace(file: TextIO, charts: Sequence[Chart], about: Mapping[str, Any]) -> None:
    """Write the charts, each as a process with a thread a rank, and `about` as what is said beside them.

    A rank has a counter of what it holds. Written event by event, so that memory does not
    grow with their number.
    """
    head = {"displayTimeUnit": "ms", "otherData": {**about, "unit": f"1 unit of the costs is {UNIT_US} us"}}
    file.write(json.dumps(head, allow_nan=False)[:-1] + ', "traceEvents": [\n')
    events = _events(charts)
    file.write(next(events, ""))
    file.writelines(f",\n{event}" for event in events)
    file.write("\n]}\n")


def _events(charts: Sequence[Chart]) -> Iterator[str]:
    for process, chart in enumerate(charts):
        yield from map(json.dumps, _names(process, chart))
        for rank in range(chart.ranks):
            yield from _spans(process, chart, rank)
            yield from _counter(process, chart, rank)


def _names(process: int, chart: Chart) -> Iterator[dict[str, Any]]:
    said: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": chart.title}),
        ("process_sort_index", 0, {"sort_index": process}),
    ]
    for rank in range(chart.ranks):
        said.append(("thread_name", rank, {"name": f"rank {rank}"}))
        said.append(("thread_sort_index", rank, {"sort_index": rank}))
    for name, thread, args in said:
        yield {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _spans(process: int, chart: Chart, rank: int) -> Iterator[str]:
    where = chart.of_rank(rank)
    start, end = _microseconds(chart.start[where]), _microseconds(chart.end[where])
    columns = (chart.op[where], chart.stage[where], chart.microbatch[where], start, end - start)
    for op, stage, microbatch, ts, dur in zip(*(column.tolist() for column in columns), strict=True):
        yield (
            f'{{"name": "{LETTERS[op]}{microbatch}", "cat": "{MEANING[op]}", "ph": "X", "ts": {ts}, "dur": {dur}, '
            f'"pid": {process}, "tid": {rank}, "args": {{"stage": {stage}, "microbatch": {microbatch}}}}}'
        )


def _counter(process: int, chart: Chart, rank: int) -> Iterator[str]:
    times, held = chart.held(rank)
    for ts, count in zip(_microseconds(times).tolist(), held.tolist(), strict=True):
        yield (
            f'{{"name": "in flight, rank {rank}", "ph": "C", "ts": {ts}, "pid": {process}, '
            f'"args": {{"{chart.holds}": {count:.15g}}}}}'
        )


def _microseconds(times: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Times of a trace, as whole numbers where they all are."""
    scaled = times * UNIT_US
    whole = np.rint(scaled)
    return whole.astype(np.int64) if np.allclose(scaled, whole, rtol=0, atol=1e-6) else scaled
