"""What a rank's process remembers of the code that ran in it, and how it forgets."""

from __future__ import annotations

import logging
import os
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from invariants.world.context import RankContext
from invariants.world.left import Left

c10d = dist.distributed_c10d


class Baseline:
    """The state of a fresh rank; `restore` brings it back after a test or an example.

    Covered: seeds of random, numpy and torch, default dtype and device, gradient mode, autocast, anomaly detection,
    deterministic algorithms, matmul precision, number of threads, environment, working directory, warning filters,
    level and handlers of the root logger, `context.state`. Not covered: attributes that were set on modules; a test
    that patches one undoes it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._environ = dict(os.environ)
        self._cwd = Path.cwd()
        self._filters = list(warnings.filters)
        self._logging = logging.root.level, list(logging.root.handlers)
        self._dtype = torch.get_default_dtype()
        self._seed()

    def restore(self, context: RankContext) -> None:
        """Undo what was left behind."""
        if dict(os.environ) != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        os.chdir(self._cwd)
        if warnings.filters != self._filters:
            warnings.filters[:] = self._filters  # type: ignore[index]
        level, logging.root.handlers[:] = self._logging
        if logging.root.level != level:
            logging.root.setLevel(level)
        torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, False)
        torch.autograd.set_detect_anomaly(False)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        context.state.clear()
        self._seed()

    def _seed(self) -> None:
        random.seed(self._rank)
        np.random.seed(self._rank)
        # Not `torch.manual_seed`: it formats and keeps a stack for each kind of device that is not in use.
        torch.default_generator.manual_seed(self._rank)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(self._rank)


def leave(context: RankContext) -> Left | None:
    """Forget what was communicated, and drop the groups that were opened; None when the world cannot go on."""
    if not dist.is_initialized() or not context.recorder.same_world:
        return None
    world = c10d._world
    kept = (c10d._get_default_group(), *context.groups.values())
    opened = [group for group in world.pg_map if group not in kept]
    names = {str(group.group_name): tuple(world.pg_group_ranks[group]) for group in opened}
    sequences = context.recorder.sequences()
    context.recorder.clear()
    if sequences is None or any(map(_stays, opened)) or _threads():
        return None
    _drop(opened)
    return Left(tuple(context.groups), names, world.group_count, *sequences)


def _stays(group: Any) -> bool:
    """Whether something else may still know the group by its name.

    DTensor keeps what it has worked out for a mesh, with the names of the mesh's groups, and an equal mesh of the next
    test would find it. A group with local synchronization gets the same name when it is opened anew, and would meet at
    the addresses of the old one.
    """
    return not str(group.group_name).isdigit() or str(group.group_desc).startswith("mesh")


def _threads() -> bool:
    """Whether a thread was left behind that is not a daemon, such as an executor's: it may communicate any time."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _drop(groups: list[Any]) -> None:
    """As `destroy_process_group`, but the backend takes itself apart in a thread: gloo's waits 20 ms for a poll."""
    world = c10d._world
    # Let go of last: torch releases the interpreter lock where a backend's own handle ends it, not where a group does.
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    while groups:
        group = groups.pop()
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            del table[group]
        world.pg_coalesce_state.pop(group, None)
        tag = world.pg_to_tag.pop(group, None)
        for known in {tag or "", ""}:
            if group in world.tags_to_pg.get(known, ()):
                world.tags_to_pg[known].remove(group)
        c10d._unregister_process_group(group.group_name)  # type: ignore[attr-defined]
        del group
    if backends:
        threading.Thread(target=backends.clear, daemon=True).start()
