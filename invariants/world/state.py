"""What a rank's process remembers of the code that ran in it, and how it forgets."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from invariants.world.context import RankContext

Issued = dict[tuple[int, ...], int | None]
"""Collectives by group, in the order of their creation; None where the rank does not know."""


class Baseline:
    """The state of a fresh rank; `restore` brings it back after a test or an example.

    Covered: seeds of random, numpy and torch, default dtype and device, gradient mode, autocast, anomaly detection,
    deterministic algorithms, matmul precision, number of threads, environment, working directory, warning filters,
    `context.state`. Not covered: attributes that were set on modules; a test that patches one undoes it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._environ = dict(os.environ)
        self._cwd = Path.cwd()
        self._filters = list(warnings.filters)
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


def communication(context: RankContext) -> Issued | None:
    """What this rank has issued in each group since the world began; None when it cannot go on.

    A group that was opened beside the context's cache costs tens of milliseconds to destroy, and hangs where only some
    ranks know it. gloo does not count point-to-point operations, nccl is not asked.
    """
    if not dist.is_initialized():
        return None
    whole = dist.distributed_c10d._get_default_group()
    groups = {tuple(range(context.world_size)): whole, **context.groups}
    if any(group not in groups.values() for group in dist.distributed_c10d._world.pg_map):
        return None
    return {ranks: _issued(group) if context.backend == "gloo" else None for ranks, group in groups.items()}


def _issued(group: object) -> int | None:
    if not isinstance(group, dist.ProcessGroup):
        return None  # this rank is not one of its members
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
