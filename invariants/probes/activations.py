"""Microbatches whose saved tensors are still held, per stage, while a trainer works.

Autograd hands each tensor that it saves to `saved_tensors_hooks` and drops what it got back when it needs it no more.
A microbatch is a call of a stage's module, and in flight as long as one of its saved tensors is held.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from invariants.evidence import StagePeak


@dataclass
class _Stage:
    in_flight: int = 0
    peak: int = 0


class _Call:
    """One microbatch's forward on one stage."""

    def __init__(self, stage: _Stage) -> None:
        self.stage = stage
        self.held = 0

    def hold(self) -> None:
        self.held += 1
        if self.held == 1:
            self.stage.in_flight += 1
            self.stage.peak = max(self.stage.peak, self.stage.in_flight)

    def release(self) -> None:
        self.held -= 1
        if self.held == 0:
            self.stage.in_flight -= 1


class _Saved:
    """Lives as long as autograd holds the tensor."""

    def __init__(self, tensor: Tensor, call: _Call | None) -> None:
        # Detached: an output that its own node saves would otherwise hold the node, a cycle that nothing ends.
        self.tensor = tensor.detach()
        self.call = call
        if call is not None:
            call.hold()

    def __del__(self) -> None:
        if self.call is not None:
            self.call.release()


class Activations:
    """Counts microbatches in flight on the stages of one rank; parameters and tensors without data aside."""

    def __init__(self, stages: Sequence[tuple[int, nn.Module]]) -> None:
        self._modules = [module for _, module in stages]
        self._stages = {index: _Stage() for index, _ in stages}
        self._calls: list[_Call] = []
        self._parameters: set[int] = set()
        self._handles: list[Any] = []
        for index, module in stages:
            stage = self._stages[index]
            enter = module.register_forward_pre_hook(lambda *_, stage=stage: self._calls.append(_Call(stage)))
            leave = module.register_forward_hook(self._leave, always_call=True)
            self._handles += [enter, leave]

    def _leave(self, *_: object) -> None:
        self._calls.pop()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one step."""
        parameters = (parameter for module in self._modules for parameter in module.parameters())
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        for stage in self._stages.values():
            stage.peak = stage.in_flight
        with saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def peaks(self, rank: int, step: int) -> list[StagePeak]:
        """What the step that was watched last has shown; collects garbage before it says that something is left."""
        if any(stage.in_flight for stage in self._stages.values()):
            gc.collect()
        return [StagePeak(rank, index, step, stage.peak, stage.in_flight) for index, stage in self._stages.items()]

    def close(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def _pack(self, tensor: Tensor) -> _Saved:
        counts = (
            self._calls
            and tensor.device.type != "meta"
            and tensor.numel() > 0
            and tensor.untyped_storage().data_ptr() not in self._parameters
        )
        return _Saved(tensor, self._calls[-1] if counts else None)
