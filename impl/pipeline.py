"""The pipeline executor: the schedule is data, and this carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        self.announce: Callable[[str], None] = lambda _: None
        """Told each cell before it is carried out, and "" at the end: what is sent meanwhile belongs to it."""

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
            self.pipeline.announce(str(cell))
            if isinstance(cell, Batch):
                self.together(cell.actions)
            elif isinstance(cell, Overlap):
                raise NotImplementedError(f"schedule cell {cell}: this executor computes one action at a time")
            elif cell.op is Op.FORWARD:
                self.forward(cell.microbatch)
            elif cell.op is Op.BACKWARD:
                self.backward(cell.microbatch)
            elif cell.op.computes:
                raise NotImplementedError(f"schedule cell {cell}: this executor runs full backwards only")
            else:
                self.communicate(cell)
        for op in tuple(self.sending):
            self.finish_send(op)
        self.pipeline.announce("")
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

    def communicate(self, action: Action) -> None:
        """Start one send, or receive one message."""
        tensor, peer = self.message(action)
        if action.op.sends:
            self.send(action, tensor, peer)
        else:
            self.receive(tensor, peer).wait()
            self.received(action)

    def together(self, actions: Sequence[Action]) -> None:
        """Post all of `actions` as one, and wait for all: alone, neighbours that both send first may hang on NCCL."""
        posts = []
        for action in actions:
            tensor, peer = self.message(action)
            how = dist.isend if action.op.sends else dist.irecv
            posts.append(dist.P2POp(how, tensor, peer, group=self.grid.pp_group))
        for work in dist.batch_isend_irecv(posts):
            work.wait()
        for action in actions:
            self.received(action)

    def message(self, action: Action) -> tuple[Tensor, int]:
        """What is sent, or a fresh tensor to receive into, and the global rank at the other end."""
        index, grid = action.microbatch, self.grid
        peer = grid.rank + (grid.dp if action.op in (Op.SEND_F, Op.RECV_B) else -grid.dp)
        if action.op.sends:
            tensor = self.outputs[index].detach() if action.op.forward else self.input_gradients.pop(index)
            self.check(action, tensor)
            return tensor.contiguous(), peer
        tensor = torch.empty(self.shape(index), dtype=self.pipeline.dtype, device=grid.device)
        (self.inputs if action.op.forward else self.output_gradients)[index] = tensor
        return tensor, peer

    def received(self, action: Action) -> None:
        """Have the gradient of an activation that has come be kept."""
        if action.op is Op.RECV_F:
            self.inputs[action.microbatch].requires_grad_()

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of what crosses a stage boundary: this microbatch's, not an earlier one's."""
        return (*self.microbatches[index].tokens.shape, self.pipeline.width)

    def check(self, action: Action, tensor: Tensor) -> None:
        """Raise where `tensor` is not what the other side allocates: gloo fills a receive buffer of another shape or
        dtype in part or with nonsense, without an error.
        """
        expected = self.shape(action.microbatch)
        if tensor.shape != expected or tensor.dtype != self.pipeline.dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise RuntimeError(f"{action}: has {found} to send, the peer receives {expected} {self.pipeline.dtype}")

    def send(self, action: Action, tensor: Tensor, peer: int) -> None:
        """Start to send to the global rank `peer`; one send in each direction is under way at most.

        The tensor is held until its send is done.
        """
        self.finish_send(action.op)
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
