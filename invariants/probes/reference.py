"""The single process that decides what is right: gradients and loss at given parameters, updates by given gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from invariants.case import Case, Precision, Topology
from invariants.errors import UsageError
from invariants.probes.data import in_precision
from invariants.probes.pieces import pieces_of
from invariants.probes.whole import Values
from invariants.target import HasReference, HasUpdateRule, Held, Kind, Moment, Target, Trainer, Window
from invariants.world.context import RankContext

DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class Reference:
    """The target's model in one process, in `precision`: each batch whole, or `decomposed` into the case's replicas x
    microbatches.
    """

    def __init__(
        self, target: Target, case: Case, context: RankContext, precision: Precision, *, decomposed: bool = False
    ) -> None:
        self.dtype = DTYPES[precision]
        self.trainer: Trainer
        if isinstance(target, HasReference):
            chosen = replace(case if decomposed else case.single(), precision=precision)
            self.trainer = target.reference(chosen, context)
        else:
            chosen = replace(_one_rank(case) if decomposed else case.single(), precision=precision)
            self.trainer = target.build(chosen, context)

        held = list(self.trainer.held(Kind.PARAMETER))
        self.unused: set[str] = set()
        self.names = {part.name for part in held}
        self.trained = {part.name: part.global_shape for part in held if part.trainable}

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
            found = _flat(self.trainer.held(Kind.PARAMETER))
        for name, values in parameters.items():
            if not torch.equal(found[name].nan_to_num(), values.to(found[name].dtype).nan_to_num()):
                raise UsageError(
                    f"reference: held(PARAMETER) yields a copy of {name}: what is put into it must reach the model"
                )

    def step(self, window: Window) -> tuple[float, dict[str, Tensor]]:
        """Train on a window; its loss, and the gradients before the update, flattened, zero where there is none."""
        gradients: dict[str, Tensor] = {}

        def observe(moment: Moment) -> None:
            if moment is Moment.REDUCED:
                gradients.update(_flat(self.trainer.held(Kind.GRADIENT)))

        loss = self.trainer.step(in_precision(window, self.dtype), observe).loss
        if loss is None:
            raise UsageError("reference: its step reports no loss; a single process knows it")
        self.unused = self.trained.keys() - gradients.keys()
        zeros = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in self.trained.items()}
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
    """The target's own update rule, else torch's optimizer of the case's kind, on plain tensors in `dtype`.

    Its state carries over between steps.
    """

    def __init__(self, target: Target, case: Case, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._slots = {name: torch.zeros(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}
        if isinstance(target, HasUpdateRule):
            self._step = target.update_rule(case, self._slots)
        else:
            rule: dict[str, Any] = {
                "lr": case.optimizer.lr,
                "weight_decay": case.optimizer.weight_decay,
                "foreach": False,
            }
            optimizer = OPTIMIZERS[case.optimizer.kind](list(self._slots.values()), **rule)
            self._step = optimizer.step

    def update(self, parameters: Values, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Flattened parameters after one step from `parameters` by `gradients`; one without a gradient may stay."""
        for name, slot in self._slots.items():
            gradient = gradients.get(name)
            slot.grad = None if gradient is None else gradient.to(slot.dtype, copy=True).view(slot.shape)
            with torch.no_grad():
                slot.copy_(parameters[name].view(slot.shape))
        self._step()
        return {name: slot.detach().reshape(-1).clone() for name, slot in self._slots.items()}
