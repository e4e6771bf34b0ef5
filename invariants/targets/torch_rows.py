"""A rank's row of a schedule as torch posts it: its own schedule code runs on a stage that computes nothing.

`Schedule*._step_microbatches` and `_batch_p2p` of `torch/distributed/pipelining/schedules.py` decide what is posted
alone and what together; only the stage and the three calls that would communicate are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from invariants.schedule.actions import Action, Batch, Cell, Op, Row


class _Done:
    """A `Work` that is complete."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class _Post:
    """Stands for a `P2POp`; where that carries a tensor, this carries the action."""

    op: Any
    tensor: Action
    peer: int
    group: None = None
    tag: int = 0

    @property
    def group_peer(self) -> int:
        return self.peer


class _DryStage:
    """Stands for a `PipelineStage`, as far as a single-stage schedule calls it."""

    has_backward = True

    def __init__(self, stage: int, stages: int, needs_grad: tuple[bool, bool], row: list[Cell]) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self._input_needs_grad, self._output_needs_grad = needs_grad
        self._row = row

    def get_fwd_recv_ops(self, chunk: int) -> list[_Post]:
        return self._post(not self.is_first, dist.irecv, Op.RECV_F, chunk, self.stage_index - 1)

    def get_fwd_send_ops(self, chunk: int) -> list[_Post]:
        return self._post(not self.is_last, dist.isend, Op.SEND_F, chunk, self.stage_index + 1)

    def get_bwd_recv_ops(self, chunk: int) -> list[_Post]:
        wanted = not self.is_last and self._output_needs_grad
        return self._post(wanted, dist.irecv, Op.RECV_B, chunk, self.stage_index + 1)

    def get_bwd_send_ops(self, chunk: int) -> list[_Post]:
        wanted = not self.is_first and self._input_needs_grad
        return self._post(wanted, dist.isend, Op.SEND_B, chunk, self.stage_index - 1)

    def _post(self, wanted: bool, op: Any, kind: Op, chunk: int, peer: int) -> list[_Post]:
        return [_Post(op, Action(self.stage_index, kind, chunk), peer)] if wanted else []

    def forward_one_chunk(self, chunk: int, *_: object, **__: object) -> None:
        self._row.append(Action(self.stage_index, Op.FORWARD, chunk))

    def backward_one_chunk(self, chunk: int, **_: object) -> None:
        self._row.append(Action(self.stage_index, Op.BACKWARD, chunk))

    def perform_reduce_grad(self, _factor: int) -> None:
        """Nothing to scale."""


def posted_row(
    schedule: type[PipelineScheduleSingle], stage: int, stages: int, microbatches: int, needs_grad: tuple[bool, bool]
) -> Row:
    """The cells of `stage` for one call of `schedule.step`; nothing is communicated.

    `needs_grad`: whether the stage's input and its output need a gradient; a boundary that needs none is not sent one.
    A send that torch posts alone stands where it is posted, though its completion is awaited later. What the schedule
    refuses (fewer microbatches than stages) is its own `ValueError`.
    """
    row: list[Cell] = []

    def alone(action: Action, **_: object) -> _Done:
        row.append(action)
        return _Done()

    def together(posts: Sequence[_Post]) -> list[_Done]:
        row.append(Batch(tuple(post.tensor for post in posts)))
        return [_Done()]

    # The constructor's annotation asks for a real stage, which cannot be made without a process group.
    dry: Any = _DryStage(stage, stages, needs_grad, row)
    plan = schedule(dry, microbatches, loss_fn=lambda *_: None)
    nothing: list[Any] = [None] * microbatches
    with (
        # Two objects: torch tells sends from receives by comparing them.
        mock.patch.multiple(dist, isend=partial(alone), irecv=partial(alone), batch_isend_irecv=together),
        mock.patch.object(plan, "_initialize_stage"),
    ):
        plan._step_microbatches(target_mbs=nothing)
    return tuple(row)
