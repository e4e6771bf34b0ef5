"""The pipeline executor: the schedule is data, and this carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from impl.grid import Grid
from impl.model import Stage, summed_loss
from invariants.schedule.actions import Action, Batch, Op, Overlap, Row


class Microbatch(NamedTuple):
    """Token ids, targets and mask, each [B, S]; every stage has all of it, and uses what it needs."""

    tokens: Tensor
    targets: Tensor
    mask: Tensor


class Pipeline:
    """One stage on this rank, and the row of the schedule that it follows.

    Activations between stages are [B, S, width] in `dtype`.
    """

    def __init__(self, stage: Stage, row: Row, grid: Grid, width: int, dtype: torch.dtype) -> None:
        self.stage = stage
        self.row = row
        self.grid = grid
        self.width = width
        self.dtype = dtype

    def run(self, microbatches: Sequence[Microbatch], count: int) -> Tensor:
        """Forward and backward of one global batch's share; adds to the parameters' gradients.

        Returns this rank's part of the window's loss, a scalar: sums of cross entropies / `count`, 0 before the last
        stage. `count` is the number of tokens that count in the *whole* window, over all replicas, so that nothing has
        to be divided later.
        """
        return Execution(self, microbatches, count).run()


class Execution:
    """One pass over the row. What it holds dies with it, so no graph is left between two passes."""

    def __init__(self, pipeline: Pipeline, microbatches: Sequence[Microbatch], count: int) -> None:
        self.pipeline = pipeline
        self.grid = pipeline.grid
        self.microbatches = microbatches
        self.count = count
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.output_gradients: dict[int, Tensor] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self.sending: dict[Op, tuple[dist.Work, Tensor]] = {}
        self.loss = torch.zeros((), dtype=pipeline.dtype, device=self.grid.device)

    def run(self) -> Tensor:
        """Carry out the row; returns the loss."""
        for cell in self.pipeline.row:
            if isinstance(cell, Batch):
                self.communicate(cell.actions)
            elif isinstance(cell, Overlap):
                raise NotImplementedError(f"schedule cell {cell}: this executor computes one action at a time")
            elif cell.op is Op.FORWARD:
                self.forward(cell.microbatch)
            elif cell.op is Op.BACKWARD:
                self.backward(cell.microbatch)
            elif cell.op.computes:
                raise NotImplementedError(f"schedule cell {cell}: this executor runs full backwards only")
            else:
                self.communicate((cell,))
        for op in tuple(self.sending):
            self.finish_send(op)
        return self.loss

    def forward(self, index: int) -> None:
        """Keep the graph of microbatch `index` until its backward."""
        microbatch = self.microbatches[index]
        x = microbatch.tokens if self.grid.first else self.inputs[index]
        y: Tensor = self.pipeline.stage(x)
        if self.grid.last:
            y = summed_loss(y, microbatch.targets, microbatch.mask) / self.count
            self.loss += y.detach()
        self.outputs[index] = y

    def backward(self, index: int) -> None:
        """Backward of microbatch `index`; its graph, input and output are let go."""
        output = self.outputs.pop(index)
        gradient = None if self.grid.last else self.output_gradients.pop(index)
        if output.requires_grad:  # else the first stage is frozen as a whole
            torch.autograd.backward(output, gradient)
        if not self.grid.first:
            gradient = self.inputs.pop(index).grad
            assert gradient is not None
            self.input_gradients[index] = gradient

    def communicate(self, actions: Sequence[Action]) -> None:
        """Post all of `actions`, then wait for the receives among them."""
        receives = [work for action in actions if (work := self.post(action)) is not None]
        for work in receives:
            work.wait()

    def post(self, action: Action) -> dist.Work | None:
        """Start a send or a receive; returns the work of a receive."""
        index, grid = action.microbatch, self.grid
        after, before = grid.rank + grid.dp, grid.rank - grid.dp
        if action.op is Op.SEND_F:
            self.send(action, self.outputs[index].detach(), after)
        elif action.op is Op.SEND_B:
            self.send(action, self.input_gradients.pop(index), before)
        elif action.op is Op.RECV_F:
            self.inputs[index] = self.buffer(index)
            work = self.receive(self.inputs[index], before)
            self.inputs[index].requires_grad_()
            return work
        else:
            self.output_gradients[index] = self.buffer(index)
            return self.receive(self.output_gradients[index], after)
        return None

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of what crosses a stage boundary: this microbatch's, not an earlier one's."""
        return (*self.microbatches[index].tokens.shape, self.pipeline.width)

    def buffer(self, index: int) -> Tensor:
        """A fresh tensor to receive into."""
        return torch.empty(self.shape(index), dtype=self.pipeline.dtype, device=self.grid.device)

    def send(self, action: Action, tensor: Tensor, peer: int) -> None:
        """Start to send to the global rank `peer`; one send in each direction is under way at most.

        The tensor is held until its send is done. gloo fills a receive buffer of another shape or dtype in part or with
        nonsense, without an error, so what is sent is checked against what the other side allocates.
        """
        expected = self.shape(action.microbatch)
        if tensor.shape != expected or tensor.dtype != self.pipeline.dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise RuntimeError(f"{action}: has {found} to send, the peer receives {expected} {self.pipeline.dtype}")
        self.finish_send(action.op)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, peer, group=self.grid.pp_group)
        assert work is not None
        self.sending[action.op] = work, tensor

    def finish_send(self, op: Op) -> None:
        """Wait for the last send of this kind, if there is one, and let go of its tensor."""
        if op in self.sending:
            work, _tensor = self.sending[op]
            work.wait()
            del self.sending[op]

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to receive from the global rank `peer`."""
        work = dist.irecv(tensor, peer, group=self.grid.pp_group)
        assert work is not None
        return work
