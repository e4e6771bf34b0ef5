"""Worlds that end in random deaths, one after the other in one session: is each named right, and is nothing left?

All is drawn from one seed. Exits with 1 where a death is told as another, or memory, descriptors, processes, shared
memory or temporary folders grow.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from invariants.world.failure import RankFailed
from invariants.world.pool import WorldPool
from invariants.world.world import World

GROWTH_MIB = 8.0
"""How much larger a process may be in the last fifth of a session than in the second."""
LEFT_S = 5.0
"""How long after the session something of it may still be there."""
SHOUT = 100 << 20
"""Bytes that a shouting rank writes to its standard error."""


def raises() -> None:
    """Like any wrong line."""
    raise LookupError("of the soak")


def killed() -> None:
    """As by the system, out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def suspended() -> None:
    """Alive, and deaf to the signal that asks for its stack."""
    os.kill(os.getpid(), signal.SIGSTOP)


def aborts() -> None:
    """As gloo does from a thread of its own."""
    os.abort()


def exits() -> None:
    """Past all handlers."""
    os._exit(7)


def loops() -> None:
    """Without an end."""
    while True:
        pass


def shouts() -> None:
    """More than any pipe holds."""
    line = b"x" * 1023 + b"\n"
    for _ in range(SHOUT >> 20):
        os.write(2, line * 1024)
    os._exit(8)


def multiplies() -> None:
    """Leaves children behind, some of them in sessions of their own."""
    for number in range(50):
        subprocess.Popen(["sleep", "1000"], start_new_session=number % 10 == 0)
    os._exit(9)


def waits() -> None:
    """For what nobody sends."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size())


@dataclass(frozen=True)
class Death:
    """A way to end, and how its failure has to be told."""

    end: Callable[[], None]
    kinds: tuple[str, ...]
    told: str

    def is_told(self, victim: int, failed: RankFailed) -> bool:
        """Whether it is the origin; where all wait for each other, one of them."""
        last = len(failed.failures) if failed.failures[0].kind == "deadlock" else 1
        return any(
            failure.rank == victim and failure.kind in self.kinds and self.told in f"{failure.headline}\n{failure.text}"
            for failure in failed.failures[:last]
        )


LATE = ("deadline", "stopped")
DEATHS = (
    Death(raises, ("raised",), "LookupError: of the soak"),
    Death(killed, ("died",), "killed by SIGKILL"),
    Death(suspended, LATE, "stopped by a signal"),
    Death(aborts, ("died",), "killed by SIGABRT"),
    Death(exits, ("died",), "exit status 7"),
    Death(loops, LATE, "in loops"),
    Death(shouts, ("died",), "exit status 8"),
    Death(multiplies, ("died",), "exit status 9"),
    Death(waits, ("deadlock", *LATE, "raised"), "in waits"),
)


def meet(context: Any, victim: int, end: Callable[[], None], others_wait: bool) -> int:
    """One rank ends in its way; the others wait for it, or are done."""
    import torch.distributed as dist

    dist.barrier()
    if context.rank == victim:
        end()
    elif others_wait:
        dist.barrier()
    return int(context.rank)


@dataclass
class Tally:
    """What was seen of each way to end."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    footprints: list[tuple[float, int]] = field(default_factory=list)

    def one(self, world: World, death: Death, victim: int, others_wait: bool) -> None:
        """Have one world end, and compare what is told."""
        name = death.end.__name__
        start = time.monotonic()
        try:
            world.run(meet, victim, death.end, others_wait)
        except RankFailed as failed:
            if not death.is_told(victim, failed):
                self.wrong.append(f"rank {victim} {name} (others wait: {others_wait}), told as:\n{failed}")
        else:
            self.wrong.append(f"rank {victim} {name}: nothing was told")
        self.seconds[name].append(time.monotonic() - start)

    def growth(self) -> tuple[float, int]:
        """MiB and descriptors that the last fifth has more than the second, as medians."""
        fifth = max(1, len(self.footprints) // 5)
        early, late = self.footprints[fifth : 2 * fifth], self.footprints[-fifth:]
        mib, descriptors = (
            statistics.median(values) - statistics.median(before)
            for before, values in zip(zip(*early, strict=True), zip(*late, strict=True), strict=True)
        )
        return mib, round(descriptors)


def footprint() -> tuple[float, int]:
    """MiB of memory and open descriptors of this process and the server of its ranks."""
    processes = [psutil.Process(), *psutil.Process().children()]
    return sum(each.memory_info().rss for each in processes) / 2**20, sum(each.num_fds() for each in processes)


def soak(worlds: int, seed: int, deadline_s: float, folder: Path) -> Tally:
    """Run so many worlds of 2 to 4 ranks, in `folder`."""
    draw = random.Random(seed)
    tally = Tally()
    with WorldPool(folder, backend="gloo", deadline_s=deadline_s) as pool:
        pool.get(2).run(_ready, deadline_s=60.0)
        for number in range(worlds):
            # As often as each other, in random order.
            if number % len(DEATHS) == 0:
                deaths = draw.sample(DEATHS, len(DEATHS))
            size = draw.choice((2, 2, 3, 4))
            tally.one(pool.get(size), deaths[number % len(DEATHS)], draw.randrange(size), draw.random() < 0.5)
            tally.footprints.append(footprint())
    return tally


def _ready(context: Any) -> None:
    """The zygote has imported."""


def left(before: set[Path], folder: Path) -> list[str]:
    """What is still there of a session in `folder`."""
    children = [f"process {child.pid}: {' '.join(child.cmdline())}" for child in psutil.Process().children(True)]
    files = {*folder.iterdir(), *(set(Path("/dev/shm").iterdir()) - before)}
    return [*children, *map(str, sorted(files))]


def main(arguments: Sequence[str]) -> int:
    """Print a table; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=3.0, help="seconds that one world has")
    given = parser.parse_args(arguments)
    before = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        tally = soak(given.worlds, given.seed, given.deadline, Path(name))
        until = time.monotonic() + LEFT_S
        while (rest := left(before, Path(name))) and time.monotonic() < until:
            time.sleep(0.05)
    table = Table(title=f"{given.worlds} worlds, seed {given.seed}, deadline {given.deadline:g} s")
    for heading in ("a rank", "worlds", "median s", "longest s"):
        table.add_column(heading, justify="left" if heading == "a rank" else "right")
    for kind, seconds in sorted(tally.seconds.items()):
        table.add_row(kind, str(len(seconds)), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}")
    console = Console()
    console.print(table)
    mib, descriptors = tally.growth()
    growth = f"{mib:+.1f} MiB, {descriptors:+d} descriptors"
    console.print(f"named wrong: {len(tally.wrong)}; growth: {growth}; left: {rest or 'nothing'}", soft_wrap=True)
    for each in tally.wrong:
        console.print(each, markup=False, highlight=False, soft_wrap=True)
    return int(bool(tally.wrong or rest or mib > GROWTH_MIB or descriptors > 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
