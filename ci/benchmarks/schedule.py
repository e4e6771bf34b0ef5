"""Judging schedules beside torch's own tools: ratios, both sides in one run.

Ours is all of it: completeness, order on each rank, deadlock with blocking sends, timeline, memory. Torch's is its
validation of the computation, its lowering to sends and receives, and its simulation. Both are seconds of CPU time, the
best of several runs, so that what else runs on the machine counts for little.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from invariants.schedule.activations import in_flight
from invariants.schedule.completeness import complete
from invariants.schedule.convert import of_actions
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower
from invariants.schedule.order import evaluate
from invariants.schedule.table import Schedule
from invariants.schedule.timeline import simulate

LARGE = ((128, 1024), (256, 2048), (512, 4096), (1024, 8192))


def judge(computation: Schedule, how: str, stages: int, microbatches: int) -> None:
    """All checks; a schedule that is not right would make the figures meaningless."""
    lowered = lower(computation, how)
    if problems := complete(lowered, stages, microbatches):
        raise SystemExit(f"incomplete: {problems[0]}")
    outcome = evaluate(lowered, "blocking")
    if not outcome.finished or outcome.mismatches:
        raise SystemExit(f"stuck: {outcome.cycle}")
    simulate(lowered)
    in_flight(lowered)


def fresh(schedule: Schedule) -> Schedule:
    """The same arrays in a schedule that has computed nothing yet."""
    return Schedule(*schedule.columns)


def seconds(function: Callable[[], object], times: int) -> float:
    """CPU time of the best of so many runs."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return min(taken)


Rows = dict[int, list[Any]]


def torch_order(name: str, ranks: int, microbatches: int) -> tuple[Rows, Callable[[int], int], int]:
    """Computation of each rank as torch's class of that name makes it, the rank of a stage, the number of stages."""
    from torch.distributed.pipelining import schedules

    if name == "Schedule1F1B":
        # Torch does not run this one through its tools; its order is the textbook's, here in torch's own objects.
        rows = generate("1f1b", ranks, microbatches).rows()
        order = {rank: [schedules._Action.from_str(str(cell)) for cell in row] for rank, row in enumerate(rows)}
        return order, lambda stage: stage, ranks
    fields = {"num_stages": 2 * ranks, "group_size": ranks, "group_rank": 0, "has_backward": True, "submod": None}
    stages = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=False, **fields) for i in range(2)]
    # The constructor would lower the order as well, which is what is to be measured.
    with mock.patch.object(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        live = getattr(schedules, name)(stages, microbatches, loss_fn=lambda *_: None)
    order = {rank: [action for action in row if action] for rank, row in live.pipeline_order.items()}
    return order, live.stage_index_to_group_rank.__getitem__, 2 * ranks


def torch_judges(order: Rows, rank_of: Callable[[int], int], stages: int, microbatches: int, sharded: bool) -> None:
    """What torch's tools do with it; `sharded` adds the lowering of its runtime, whose output its simulator rejects."""
    from torch.distributed.pipelining import schedules

    order = {rank: list(row) for rank, row in order.items()}  # its lowering takes its input apart
    schedules._validate_schedule(order, len(order), stages, microbatches)
    if sharded:
        for row in order.values():
            schedules._add_reduce_grad(schedules._add_unshard_reshard(row), microbatches)
    schedules._simulate_comms_compute(schedules._add_send_recv(order, rank_of, stages), rank_of, stages)


def against_torch(ranks: int, microbatches: int) -> None:
    """The ratios to torch at one size."""
    print(f"{ranks} ranks x {microbatches} microbatches; seconds, and torch's as a multiple of ours")
    if (ranks, microbatches) != (64, 1024):
        print("  (what is asked is asked at 64 x 1024)")
    cases = (
        ("Schedule1F1B", "receive-first", False, 40),
        ("ScheduleInterleaved1F1B", "in-order", False, 100),
        ("ScheduleZBVZeroBubble", "in-order", True, 300),
    )
    for name, how, sharded, asked in cases:
        order, rank_of, stages = torch_order(name, ranks, microbatches)
        judge(of_actions(order), how, stages, microbatches)  # compiles
        ours = seconds(partial(lambda rows, *rest: judge(of_actions(rows), *rest), order, how, stages, microbatches), 8)
        times = 3 if name == "Schedule1F1B" else 1  # the others take long enough to be steady
        theirs = seconds(partial(torch_judges, order, rank_of, stages, microbatches, sharded), times)
        print(f"  {name:24} from its action lists  {ours:8.3f} {theirs:8.2f}  {theirs / ours:6.0f}x (asked: {asked}x)")
        if name == "Schedule1F1B":
            arrays = of_actions(order)
            ours = seconds(lambda arrays=arrays: judge(fresh(arrays), "receive-first", ranks, microbatches), 20)
            print(f"  {name:24} from arrays            {ours:8.3f} {theirs:8.2f}  {theirs / ours:6.0f}x (asked: 300x)")


def one_large(ranks: int, microbatches: int) -> None:
    """Judge one large 1F1B; prints seconds, those of CPU time, actions and the peak memory of this process in bytes."""
    judge(generate("1f1b", 4, 8), "receive-first", 4, 8)
    start, used = time.perf_counter(), time.process_time()
    judge(generate("1f1b", ranks, microbatches), "receive-first", ranks, microbatches)
    taken, used = time.perf_counter() - start, time.process_time() - used
    print(taken, used, 2 * ranks * microbatches, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def large() -> None:
    """1F1B of several sizes, each in a process of its own: time, memory, and how time grows."""
    print("1F1B from nothing: made, lowered, judged; each in a process of its own")
    points = []
    for ranks, microbatches in LARGE:
        command = [sys.executable, __file__, "--one", str(ranks), str(microbatches)]
        taken, used, actions, peak = map(
            float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        )
        points.append((math.log(actions), math.log(used)))
        figures = f"{actions / 1e6:6.1f} million computations {taken:7.2f} s ({used:.2f} s of CPU) {peak / 1e9:6.2f} GB"
        print(f"  {ranks:5} x {microbatches:5}  {figures}")
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    print(
        f"  CPU time grows with the number of actions to the power {slope:.2f} (asked: 4 s and 2 GB at the last size)"
    )


def small() -> None:
    """Schedules for property tests."""
    schedule = generate("1f1b", 4, 8)
    judge(schedule, "receive-first", 4, 8)
    each = seconds(lambda: [judge(fresh(schedule), "receive-first", 4, 8) for _ in range(200)], 5) / 200
    print(f"4 x 8, made afresh, lowered and judged: {1 / each:.0f} a second (asked: 1000)")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--parts", nargs="*", choices=("torch", "large", "small"), default=("small", "large", "torch"))
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one_large(*given.one)
        return
    for part in given.parts:
        {"torch": partial(against_torch, given.ranks, given.microbatches), "large": large, "small": small}[part]()


if __name__ == "__main__":
    main()
