"""The single process that decides what is right: gradients and loss at given parameters, updates by given gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from invariants.case import Case, OptimizerSpec, Topology
from invariants.errors import UsageError
from invariants.probes.data import in_precision
from invariants.probes.pieces import pieces_of
from invariants.probes.whole import Values
from invariants.target import HasReference, Held, Kind, Moment, Target, Trainer, Window
from invariants.world.context import RankContext

DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class Reference:
    """The target's model in one process, in float64 and one block, or as `decomposed`: in the case's own precision, cut
    into its replicas x microbatches.
    """

    def __init__(self, target: Target, case: Case, context: RankContext, *, decomposed: bool) -> None:
        self.dtype = DTYPES[case.precision] if decomposed else torch.float64
        self.trainer: Trainer
        if isinstance(target, HasReference):
            self.trainer = target.reference(case if decomposed else case.single(), context)
        else:
            self.trainer = target.build(_one_rank(case) if decomposed else case.single(), context)

        held = list(self.trainer.held(Kind.PARAMETER))
        self.names = {part.name for part in held}
        self.trained = tuple(dict.fromkeys(part.name for part in held if part.trainable))

    def set(self, parameters: Values) -> None:
        """Take over values, flattened, by name."""
        if different := self.names ^ parameters.keys():
            raise UsageError(
                f"parameters {', '.join(sorted(different))}: held by the reference or by the ranks alone; "
                "give them the same names on both"
            )
        with torch.no_grad():
            for held in self.trainer.held(Kind.PARAMETER):
                assert isinstance(held.tensor, Tensor)
                values = parameters[held.name]
                part = values.view(held.global_shape)
                if held.flat_range is not None:
                    part = values[slice(*held.flat_range)]
                elif held.slices is not None:
                    part = part[tuple(slice(*bounds) for bounds in held.slices)]
                held.tensor.copy_(part.reshape(held.tensor.shape))

    def step(self, window: Window) -> tuple[float, dict[str, Tensor]]:
        """Train on a window; its loss, and the gradients before the update, flattened, zero where there is none."""
        gradients: dict[str, Tensor] = {}

        def observe(moment: Moment) -> None:
            if moment is Moment.REDUCED:
                gradients.update(_flat(self.trainer.held(Kind.GRADIENT)))

        loss = self.trainer.step(in_precision(window, self.dtype), observe).loss
        if loss is None:
            raise UsageError("reference: its step reports no loss; a single process knows it")
        trained = {held.name: held for held in self.trainer.held(Kind.PARAMETER) if held.trainable}
        zeros = {name: torch.zeros(torch.Size(held.global_shape).numel()) for name, held in trained.items()}
        return loss, {name: gradients.get(name, zero) for name, zero in zeros.items()}


def _one_rank(case: Case) -> Case:
    axes = tuple((name, 1) for name, _ in case.topology.axes)
    blocks = case.microbatches * case.topology.size("dp")
    return replace(case, topology=Topology(axes), microbatches=blocks, split=None)


def _flat(held: Iterable[Held]) -> dict[str, Tensor]:
    """Whole tensors, copied; a single process may still hold one as several pieces."""
    found: dict[str, Tensor] = {}
    for piece in pieces_of(held):
        if piece.values is not None and piece.role == "value":
            size = torch.Size(piece.whole).numel()
            whole = found.setdefault(piece.name, torch.zeros(size, dtype=piece.values.dtype))
            whole[piece.lo : piece.hi] = piece.values
    return found


class ReferenceOptimizer:
    """torch's optimizer of the case's kind, on flattened tensors, in `dtype`; its state carries over between steps."""

    def __init__(self, spec: OptimizerSpec, names: Iterable[str], dtype: torch.dtype) -> None:
        self._slots = {name: torch.zeros(0, dtype=dtype, requires_grad=True) for name in names}
        rule: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay, "foreach": False}
        self._optimizer = OPTIMIZERS[spec.kind](list(self._slots.values()), **rule)
        self._dtype = dtype

    def update(self, parameters: Values, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Parameters after one step from `parameters` by `gradients`; one without a gradient stays as it is."""
        for name, slot in self._slots.items():
            gradient = gradients.get(name)
            slot.data = parameters[name].to(self._dtype, copy=True)
            slot.grad = None if gradient is None else gradient.to(self._dtype, copy=True)
        self._optimizer.step()
        return {name: slot.data.clone() for name, slot in self._slots.items()}

    def state(self) -> dict[str, Any]:
        """A copy of the state, for `restore`."""
        return copy.deepcopy(self._optimizer.state_dict())

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to it."""
        self._optimizer.load_state_dict(state)
