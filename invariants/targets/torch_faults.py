"""Wrong lines around torch's parts, each standing for a public report, and variants that are just as right.

Torch is imported by a patch when it is entered, so that the controller can list the names without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from invariants.case import Case
from invariants.target import Fault


@contextmanager
def _bare_module() -> Iterator[None]:
    """The stage is given the module inside DDP, so that nobody reduces its gradients."""
    from torch.distributed.pipelining import PipelineStage

    original: Callable[..., None] = PipelineStage.__init__

    def bare(self: object, submodule: Any, *args: object, **kwargs: object) -> None:
        original(self, getattr(submodule, "module", submodule), *args, **kwargs)

    with mock.patch.object(PipelineStage, "__init__", bare):
        yield


@contextmanager
def _eager_warmup() -> Iterator[None]:
    """1F1B runs all forwards before its first backward."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    with mock.patch.object(Schedule1F1B, "_step_microbatches", ScheduleGPipe._step_microbatches):
        yield


@contextmanager
def _stale_shards() -> Iterator[None]:
    """Each rank updates the parameters that it owns and tells nobody."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with mock.patch.object(ZeroRedundancyOptimizer, "_sync_params"):
        yield


@contextmanager
def _moments_lost() -> Iterator[None]:
    """Loading leaves a new optimizer's state as empty as it was."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with mock.patch.object(ZeroRedundancyOptimizer, "load_state_dict"):
        yield


@contextmanager
def _synced_every_microbatch() -> Iterator[None]:
    """Each backward lets DDP reduce what has accumulated, as if there were no `no_sync`."""
    from torch.distributed.pipelining import PipelineStage

    original: Callable[..., object] = PipelineStage.backward_maybe_with_nosync

    def synced(self: object, *arguments: object, **_: object) -> object:
        return original(self, *arguments, last_backward=True)

    with mock.patch.object(PipelineStage, "backward_maybe_with_nosync", synced):
        yield


@contextmanager
def _pairs_one_by_one() -> Iterator[None]:
    """What is posted as a batch, since neighbours may both send first, is posted one by one."""
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules

    def post(posts: Any, **_: object) -> Any:
        names = [(each, "group_dst" if each.op is dist.isend else "group_src") for each in posts]
        return [each.op(each.tensor, group=each.group, **{name: each.group_peer}) for each, name in names]

    with mock.patch.object(schedules, "_batch_p2p", post):
        yield


def _forced(import_class: Callable[[], type], **forced: object) -> Callable[[], AbstractContextManager[object]]:
    """A patch under which the class is always made with these keyword arguments."""

    @contextmanager
    def patch() -> Iterator[None]:
        cls: Any = import_class()
        original = cls.__init__

        def init(self: object, *args: object, **kwargs: object) -> None:
            original(self, *args, **{**kwargs, **forced})

        with mock.patch.object(cls, "__init__", init):
            yield

    return patch


def _ddp() -> type:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel


def _zero() -> type:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer


def _schedule() -> type:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return PipelineScheduleSingle


def _replicated(case: Case) -> bool:
    return case.topology.size("dp") > 1


FAULTS: Mapping[str, Fault] = {
    "bare-module": Fault(
        "https://github.com/OrderLab/TrainCheck-Evaluation-Workloads/blob/c524bc72d8e894c78324f479da0e1e74f5f0b400/"
        "silent-issue-detection/bug-reprod-scripts/x-jxmnop-ddp-out-of-sync/README.md",
        _bare_module,
        applies=_replicated,
    ),
    "scaled-twice": Fault(
        "https://github.com/areal-project/AReaL/pull/1273",
        _forced(_schedule, scale_grads=True),
        applies=lambda case: case.microbatches > 1,
    ),
    "eager-warmup": Fault(
        "https://github.com/pytorch/pytorch/issues/128910",
        _eager_warmup,
        applies=lambda case: case.schedule == "1f1b" and case.microbatches > 1,
    ),
    "stale-shards": Fault("https://github.com/lodestone-rock/RamTorch/issues/13", _stale_shards, applies=_replicated),
    "moments-lost": Fault(
        "https://github.com/pytorch/pytorch/issues/126881",
        _moments_lost,
        applies=lambda case: case.save_after is not None and case.optimizer.kind != "sgd",
    ),
    "synced-every-microbatch": Fault(
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2370",
        _synced_every_microbatch,
        applies=lambda case: _replicated(case) and case.microbatches > 1,
    ),
    "pairs-one-by-one": Fault(
        "https://github.com/NVIDIA/nccl/issues/479",
        _pairs_one_by_one,
        applies=lambda case: case.schedule == "1f1b" and case.topology.size("pp") > 1,
    ),
    "many-buckets": Fault(
        "where DDP cuts its buckets changes no sum of two gradients, and of more their order only",
        _forced(_ddp, bucket_cap_mb=1e-4, gradient_as_bucket_view=True),
        harmless=True,
        applies=_replicated,
    ),
    "unused-sought": Fault(
        "DDP looks for unused parameters where there are none",
        _forced(_ddp, find_unused_parameters=True),
        harmless=True,
        applies=_replicated,
    ),
    "bucket-view": Fault(
        "ZeroRedundancyOptimizer sends the same values bucket by bucket",
        _forced(_zero, parameters_as_bucket_view=True),
        harmless=True,
        applies=_replicated,
    ),
}
