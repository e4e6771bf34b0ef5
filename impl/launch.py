"""Worlds for the command line: processes of our own, or the world that torchrun has made."""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for the others in one operation."""

Work = Callable[[torch.device, Any], None]
"""What each rank runs, with its device and an argument that can be pickled."""


class RankFailed(RuntimeError):
    """A rank of our own raised or died; the message names it, with its traceback or signal."""


def torchrun_world() -> int | None:
    """World size of the torchrun that started this process; None where none did."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def own_rank() -> int:
    """Rank of this process in torchrun's world, 0 outside of one."""
    return int(os.environ.get("RANK", 0))


def in_torchrun(work: Work, argument: Any) -> None:
    """Run `work` as one rank of torchrun's world."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    _rank(work, argument, local, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), {"init_method": "env://"})


def in_own_processes(world: int, work: Work, argument: Any) -> None:
    """Run `work` on `world` processes and wait for them; raises `RankFailed` where one of them does not end well.

    Ranks are forked from this process, which has imported torch and computed nothing: a child of a process that has run
    threads of OpenMP would hang. They meet in a private folder, over the loopback device. Neither processes nor folder
    are left: after success, a failure, Ctrl-C, SIGTERM, or (the processes) a killed parent.
    """
    importlib.import_module("torch._dynamo")  # torch's optimizers ask for it: imported once, not once a rank
    before = signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="impl-") as folder:
        ranks = start_processes(  # type: ignore[no-untyped-call]
            _child, (world, folder, work, argument), nprocs=world, join=False, daemon=True, start_method="fork"
        )
        try:
            while not ranks.join():
                pass
        except ProcessRaisedException as error:
            raise RankFailed(f"rank {error.error_index} failed{error.msg}") from None
        except ProcessExitedException as error:
            raise RankFailed(f"rank {error.error_index} died: {error.msg}") from None
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in ranks.processes:
                process.kill()
            for process in ranks.processes:
                process.join()


def _child(rank: int, world: int, folder: str, work: Work, argument: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group: the parent ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    _rank(work, argument, rank, world, store)


def _rank(work: Work, argument: Any, local: int, local_world: int, rendezvous: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT, **rendezvous)
    try:
        work(device, argument)
    finally:
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """A rank that waits for a peer does not notice that nobody waits for it any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)
