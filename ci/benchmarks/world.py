"""Worlds beside torch's own test harness: ratios, both sides in one run.

Each example is one all-reduce of 1 KB. `MultiProcessTestCase` starts its processes for each test,
`MultiProcContinuousTest` keeps them for a class; both are of `torch.testing._internal.common_distributed`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from invariants.world.pool import RankFailed, WorldPool

ELEMENTS = 256
"""Of float32: 1 KB."""
FOLDER = "WORLD_BENCH_FOLDER"
"""Variable of the environment: where process groups meet."""


def reduce(_: Any) -> None:
    """The example."""
    dist.all_reduce(torch.ones(ELEMENTS))


def reduce_in_fresh_group(context: Any) -> None:
    """The example in a group of its own."""
    dist.all_reduce(torch.ones(ELEMENTS), group=dist.new_group(range(context.world_size)))


def reduce_often(_: Any, times: int) -> float:
    """Seconds of one all-reduce, without what brings it to the rank: the median."""
    tensor, taken = torch.ones(ELEMENTS), []
    for _ in range(times):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def nothing(_: Any) -> None:
    """What is left of an example without its work: the dispatch."""


def die(context: Any) -> None:
    """End as a killed rank does."""
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1.0)


def median(function: Callable[[], object], times: int) -> float:
    """Seconds: the median of so many runs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def examples(pool: WorldPool, size: int, function: Callable[[Any], None], times: int) -> float:
    """Seconds of an example on a warm world, its reset included."""
    world = pool.get(size)

    def example() -> None:
        world.run(function)
        world.reset()

    for _ in range(3):
        example()
    return median(example, times)


def new_world(pool: WorldPool, size: int) -> None:
    """A world of new processes for one example."""
    world = pool.fresh(size)
    world.run(reduce)
    world.close()


def replacement(pool: WorldPool, size: int, times: int) -> float:
    """Seconds from the moment at which the error of a killed world is there to the answer of its successor."""
    world, taken = pool.get(size), []
    for _ in range(times):
        try:
            world.run(die)
        except RankFailed:
            start = time.perf_counter()
            world.run(nothing)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Timed(unittest.TestResult):
    """Notes how long each test took, and stops at the first that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[float] = []

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        """Called by unittest."""
        super().startTest(test)
        self._start = time.perf_counter()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        """Called by unittest."""
        super().stopTest(test)
        self.taken.append(time.perf_counter() - self._start)


def of_torch(kind: type[unittest.TestCase], times: int) -> float:
    """Seconds of a test of torch's harness: the median of so many in one suite."""
    result = Timed()
    unittest.TestSuite([kind("test_reduce") for _ in range(times)]).run(result)
    if not result.wasSuccessful():
        raise SystemExit("torch's harness: " + (result.errors + result.failures)[0][1])
    return statistics.median(result.taken)


class Spawned(MultiProcessTestCase):
    """Processes of its own for each test."""

    size = 2

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.size

    def setUp(self) -> None:
        """Called by unittest."""
        super().setUp()
        self._spawn_processes()

    def test_reduce(self) -> None:
        """The example."""
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        dist.all_reduce(torch.ones(ELEMENTS))
        dist.destroy_process_group()


class Kept(MultiProcContinuousTest):
    """The processes of a class."""

    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        """For torch's harness."""
        return "gloo"

    def test_reduce(self) -> None:
        """The example."""
        dist.all_reduce(torch.ones(ELEMENTS))


class Anew(Kept):
    """The processes of a class, with a process group for each test. Torch starts the processes of a class once."""

    made = 0

    def test_reduce(self) -> None:
        """The example, after destroying the process group and making it anew."""
        cls = type(self)
        cls.made += 1
        dist.destroy_process_group()
        self._init_pg(self.rank, self.world_size, str(Path(os.environ[FOLDER], f"{self.world_size}.{cls.made}")))
        super().test_reduce()


class Spawned4(Spawned):
    """On four ranks."""

    size = 4


class Kept4(Kept):
    """On four ranks."""

    world_size = 4


class Anew4(Anew):
    """On four ranks."""

    world_size = 4


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=60, help="examples of each kind (default: 60)")
    parser.add_argument("--spawns", type=int, default=3, help="tests of torch's that start processes (default: 3)")
    options = parser.parse_args(arguments)
    times = options.times
    with (
        tempfile.TemporaryDirectory() as meeting,
        tempfile.TemporaryDirectory() as folder,
        WorldPool(Path(folder), backend="gloo") as pool,
    ):
        os.environ[FOLDER] = meeting
        for size, spawned, kept, anew in ((2, Spawned, Kept, Anew), (4, Spawned4, Kept4, Anew4)):
            ours = median(partial(new_world, pool, size), 10)
            row(f"{size} ranks, a new world a test", of_torch(spawned, options.spawns), ours, 100)
            ours = examples(pool, size, reduce, times)
            row(f"{size} ranks, a warm example", of_torch(kept, times), ours, 2.5 if size == 2 else 1)
            ours = examples(pool, size, reduce_in_fresh_group, times)
            row(f"{size} ranks, a fresh group an example", of_torch(anew, times), ours, 8 / size)
        pool.get(4).run(nothing)
        (reducing, *_) = pool.get(4).run(reduce_often, times)
        dispatch = median(lambda: pool.get(4).run(nothing), times)
        print(f"4 ranks: dispatch {dispatch * 1e3:.2f} ms, {dispatch / reducing:.1%} of an all-reduce (asked: <= 5%)")
        print(f"4 ranks: replacing a killed world {replacement(pool, 4, 10) * 1e3:.0f} ms (asked: <= 100)")


def row(what: str, peer: float, ours: float, asked: float) -> None:
    """Print one comparison."""
    ratio = f"{peer / ours:.1f}x (asked: {asked:g}x)"
    print(f"{what}: torch's {peer * 1e3:.2f} ms, ours {ours * 1e3:.2f} ms: {ratio}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
