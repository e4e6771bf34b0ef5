"""What the record of ranks costs: a training step over groups that record beside one over groups that do not.

Both are steps of a tiny GPT on the same ranks, in turns: what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from impl.config import Config
from impl.grid import Grid
from impl.model import GPT
from impl.trainer import Trainer
from invariants.target import GlobalBatch
from invariants.world.pool import WorldPool

GRIDS = ({"pp": 2, "dp": 2}, {"pp": 1, "dp": 4})
MODEL = GPT(layers=6, width=128, heads=4, vocabulary=64, sequence=64)
"""A character-level toy: 1.2 million parameters."""
LIMIT = 0.05
c10d = dist.distributed_c10d


@contextmanager
def unrecorded() -> Iterator[None]:
    """Groups that are made inside are torch's own."""
    recording = c10d.ProcessGroup
    c10d.ProcessGroup = recording.__bases__[0]  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroup = recording  # type: ignore[misc]


def trainer_of(context: Any, config: Config) -> Trainer:
    """All of its communication is in groups that are made here."""
    grid = Grid.create(config.pp, config.dp, context.device)
    return Trainer(config, replace(grid, world_group=dist.new_group()))


def build(context: Any, pp: int, dp: int) -> tuple[int, int]:
    """Both trainers; returns the operations that a step records, of each."""
    config = Config(pp=pp, dp=dp, microbatches=4, model=MODEL)
    shape = (config.batch_size, config.model.sequence)
    tokens, targets = torch.randint(config.model.vocabulary, (2, *shape), generator=torch.Generator().manual_seed(0))
    context.state["window"] = [GlobalBatch(tokens, targets, torch.ones(shape))]
    context.state["recorded"] = trainer_of(context, config)
    with unrecorded():
        context.state["plain"] = trainer_of(context, config)
    counts = []
    for name in ("recorded", "plain"):
        before = context.recorder.posted
        context.state[name].step(context.state["window"])
        counts.append(context.recorder.posted - before)
    return counts[0], counts[1]


def turns(context: Any, times: int, steps: int) -> list[dict[str, tuple[float, float]]]:
    """Of each turn and side, seconds of `steps` steps: by the clock, and of this process's cores."""
    taken = []
    for turn in range(times):
        sides = {}
        for name in ("recorded", "plain") if turn % 2 else ("plain", "recorded"):
            trainer, window = context.state[name], context.state["window"]
            dist.barrier()
            clock, cores = time.perf_counter(), time.process_time()
            for _ in range(steps):
                trainer.step(window)
            sides[name] = time.perf_counter() - clock, time.process_time() - cores
        taken.append(sides)
    return taken


def measure(pool: WorldPool, pp: int, dp: int, times: int, steps: int) -> float:
    """Print the figures of one grid; returns the share of a step's core time that its record takes."""
    world = pool.fresh(pp * dp)
    recorded, plain = (max(counts) for counts in zip(*world.run(build, pp, dp), strict=True))
    if plain or not recorded:
        raise SystemExit(f"{recorded} and {plain} operations are recorded: expected some, and none")
    world.run(turns, 3, steps)
    by_rank = world.run(turns, times, steps)
    shares = []
    for kind in (0, 1):
        # The slowest rank by the clock; all ranks together by their cores.
        over = (max, sum)[kind]
        sums = [{name: over(rank[name][kind] for rank in ranks) for name in ranks[0]} for ranks in zip(*by_rank)]  # noqa: B905
        shares.append([turn["recorded"] / turn["plain"] - 1 for turn in sums])
    clock, cores = map(statistics.median, shares)
    low, high = statistics.quantiles(shares[1], n=4)[::2]
    step = statistics.median(rank[turn]["plain"][1] for rank in by_rank for turn in range(times)) / steps
    print(
        f"  pp={pp} dp={dp}  {recorded:3} operations a step of {1e3 * step:.0f} ms  {clock:+7.1%} by the clock  "
        f"{cores:+7.1%} of the cores ({low:+.1%} to {high:+.1%})"
    )
    world.close()
    return cores


def main() -> None:
    """Measure each grid; fails where the record costs more than is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    print(f"a step over recorded groups, beside one over plain ones (asked: at most {LIMIT:+.0%})")
    with tempfile.TemporaryDirectory() as folder, WorldPool(Path(folder), deadline_s=600.0) as pool:
        shares = [measure(pool, times=given.turns, steps=given.steps, **grid) for grid in GRIDS]
    if max(shares) > LIMIT:
        raise SystemExit(f"the record costs {max(shares):.1%} of a step: asked were at most {LIMIT:.0%}")


if __name__ == "__main__":
    main()
