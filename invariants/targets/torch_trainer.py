"""Trainers on torch's parts: pipelined, replicated and sharded on many ranks, and the plain one to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from invariants.case import Case
from invariants.errors import Refused, UsageError
from invariants.probes.reference import OPTIMIZERS
from invariants.target import MISSING, GlobalBatch, Held, Kind, Moment, StepResult, Window
from invariants.targets.torch_model import Stage, activation, build_layers, cut
from invariants.targets.torch_rows import posted_row
from invariants.world.context import RankContext

SCHEDULES: Mapping[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_IGNORED = -100
_STEPS, _RNG, _OPTIMIZER = "steps", "rng", "optimizer"


def token_loss(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Cross entropies of the tokens that count, summed, times `scale`; logits [batch, sequence, vocabulary]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum") * scale


def _targets(batch: GlobalBatch, device: torch.device) -> Tensor:
    return batch.targets.masked_fill(batch.mask == 0, _IGNORED).to(device)


def _counted(window: Window) -> float:
    return max(1.0, sum(float(batch.mask.sum()) for batch in window))


def _arguments(case: Case) -> dict[str, Any]:
    return {"lr": case.optimizer.lr, "weight_decay": case.optimizer.weight_decay}


def _shapes_given(case: Case) -> bool:
    text = dict(case.options).get("shapes", "given")
    if text not in ("given", "inferred"):
        raise UsageError(f"case: x.shapes={text}: expected given or inferred")
    return text == "given"


def _held(kind: Kind, module: nn.Module, state: Mapping[Tensor, Mapping[str, Tensor]]) -> Iterator[Held]:
    for name, parameter in module.named_parameters():
        shape, trainable = tuple(parameter.shape), parameter.requires_grad
        if kind is Kind.PARAMETER:
            yield Held(name, parameter.detach(), shape, trainable=trainable)
        elif kind is Kind.GRADIENT:
            gradient = MISSING if parameter.grad is None else parameter.grad
            yield Held(name, gradient, shape, trainable=trainable)
        elif kind is Kind.OPTIMIZER:
            for key, value in state.get(parameter, {}).items():
                counts = value.dim() == 0 and shape != ()
                yield Held(name, value, tuple(value.shape), state_key=key, role="counter" if counts else "value")


class PipelineTrainer:
    """One stage of the model: its schedule over `pp`, DDP and `ZeroRedundancyOptimizer` over `dp`.

    The loss of a window is a mean over all tokens that count in it, so that no part may average by itself: the number
    of tokens is taken over the whole window first, `loss_fn` sums and divides by it, the schedule gets
    `scale_grads=False`, and since DDP averages over the replicas, `loss_fn` multiplies by their number. Accumulation is
    one `schedule.step` a global batch before one optimizer step; each of them lets DDP reduce what has accumulated,
    which changes nothing, because the mean of a mean is that mean.

    Shapes are given to `PipelineStage` up front, so that every call of a stage's module is one microbatch; with the
    option `x.shapes=inferred` it runs them once more in the first step to learn the shapes. Torch 2.13 then fails under
    DDP where all backwards of a stage follow each other without a forward (GPipe with 2 microbatches or more, 1F1B with
    as many as stages): the run for the shapes arms the reducer, whose buckets are then rebuilt from two reductions.

    A stage whose layers are all frozen gets neither DDP nor an optimizer: both refuse a module without trainable
    parameters.
    """

    def __init__(self, case: Case, rank: RankContext) -> None:
        stages, here = case.topology.size("pp"), case.topology.coordinate(rank.rank)
        self._case, self._rank, self._steps = case, rank, 0
        self._index, self._replica = here.get("pp", 0), here.get("dp", 0)
        layers = cut(case)[self._index]
        before, after = (activation(case, rank.device, after=layer) for layer in (layers[0] - 1, layers[-1]))
        schedule = SCHEDULES[case.schedule]
        try:
            self._row = posted_row(
                schedule, self._index, stages, case.microbatches, (before.requires_grad, after.requires_grad)
            )
        except ValueError as error:
            raise Refused(f"{schedule.__name__}: {' '.join(str(error).split())}") from error

        shapes: dict[str, Any] = {"input_args": before, "output_args": after} if _shapes_given(case) else {}
        everything = build_layers(case, rank.device)
        # From here on ranks communicate: each asks for all groups, in one order.
        pp_group, self._dp_group = (rank.axis_group(case.topology, axis) for axis in ("pp", "dp"))
        self.module = Stage({index: everything[index] for index in layers})
        self._trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._wrapped: nn.Module = self.module
        self._optimizer: ZeroRedundancyOptimizer | None = None
        if self._trained:
            self._wrapped = DistributedDataParallel(self.module, process_group=self._dp_group)
            self._optimizer = ZeroRedundancyOptimizer(
                self._trained,
                optimizer_class=OPTIMIZERS[case.optimizer.kind],
                process_group=self._dp_group,
                **_arguments(case),
            )
        self._stage = PipelineStage(self._wrapped, self._index, stages, rank.device, group=pp_group, **shapes)
        self._schedule = schedule(self._stage, case.microbatches, loss_fn=token_loss, scale_grads=False)

    def step(self, window: Window, observe: Callable[[Moment], None]) -> StepResult:
        """Train on this replica's share of the window; the loss is known on the last stage's ranks."""
        replicas = self._case.topology.size("dp")
        scale = replicas / _counted(window)
        self._wrapped.zero_grad()
        losses = [self._forward_backward(batch, scale) for batch in window]
        observe(Moment.REDUCED)
        if self._optimizer is not None:
            self._optimizer.step()
        self._steps += 1
        if not self._stage.is_last:
            return StepResult(loss=None)
        total = torch.stack(losses).sum() / replicas
        dist.all_reduce(total, group=self._dp_group)
        return StepResult(loss=total.item())

    def _forward_backward(self, batch: GlobalBatch, scale: float) -> Tensor:
        device = self._rank.device
        share = self._case.microbatches * self._case.microbatch_size
        mine = slice(self._replica * share, (self._replica + 1) * share)
        inputs = [batch.tokens[mine].to(device)] if self._stage.is_first else []
        targets = _targets(batch, device)[mine] if self._stage.is_last else None
        losses: list[Tensor] = []
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False, loss_kwargs={"scale": scale})
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=device)

    def held(self, kind: Kind) -> Iterable[Held]:
        """This stage's parameters and gradients, and the optimizer state of the parameters that this rank owns."""
        return _held(kind, self.module, {} if self._optimizer is None else self._optimizer.optim.state)

    def steps_done(self) -> int:
        """Optimizer steps since the start of the training."""
        return self._steps

    def schedule(self) -> Sequence[str]:
        """This rank's row for one global batch, with the sends and receives where torch posts them."""
        return [str(cell) for cell in self._row]

    def stages(self) -> Sequence[tuple[int, nn.Module]]:
        """The one stage of this rank."""
        return [(self._index, self.module)]

    def save(self, path: Path) -> None:
        """Write with `torch.distributed.checkpoint`, into a folder that holds no checkpoint yet.

        Optimizer state as `ZeroRedundancyOptimizer` documents it: consolidated on one rank of each group, saved there.
        """
        state = self._state()
        if self._optimizer is not None:
            self._optimizer.consolidate_state_dict(to=0)
            if self._replica == 0:
                whole = self._optimizer.state_dict()["state"]
                state |= {
                    f"{_OPTIMIZER}.{name}.{key}": value
                    for index, name in enumerate(self._trained_names())
                    for key, value in whole.get(index, {}).items()
                }
        save(state, checkpoint_id=path)

    def load(self, path: Path) -> None:
        """Read what `save` wrote on the same grid; a rank is given the state of its whole stage and keeps its own."""
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        places: dict[str, tuple[int, str]] = {}
        for index, name in enumerate(self._trained_names()):
            prefix = f"{_OPTIMIZER}.{name}."
            places |= {key: (index, key.removeprefix(prefix)) for key in stored if key.startswith(prefix)}
        state = self._state() | {key: _empty(stored[key]) for key in places}
        load(state, checkpoint_id=path)
        set_model_state_dict(self._wrapped, {name: state[name] for name, _ in self.module.named_parameters()})
        if self._optimizer is not None:
            entries: dict[int, dict[str, Tensor]] = {}
            for key, (index, field) in places.items():
                entries.setdefault(index, {})[field] = state[key]
            (group,) = self._optimizer.param_groups
            groups = [{**group, "params": list(range(len(self._trained)))}]
            self._optimizer.load_state_dict({"state": entries, "param_groups": groups})
        self._steps = int(state[_STEPS])
        torch.set_rng_state(state[f"{_RNG}.{self._rank.rank}"])

    def _state(self) -> dict[str, Any]:
        """What does not depend on the optimizer; ranks that hold the same key hold the same value."""
        return {
            **get_model_state_dict(self._wrapped),
            _STEPS: torch.tensor(self._steps),
            f"{_RNG}.{self._rank.rank}": torch.get_rng_state(),
        }

    def _trained_names(self) -> list[str]:
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]


def _empty(stored: object) -> Tensor:
    if not isinstance(stored, TensorStorageMetadata):
        raise UsageError(f"checkpoint: optimizer state stored as {type(stored).__name__}: expected a tensor")
    return torch.empty(stored.size, dtype=stored.properties.dtype)


class PlainTrainer:
    """The whole model in one process: autograd and `torch.optim`, no pipeline, no DDP, no ZeRO.

    The blocks that the replicas and microbatches of the case would take are trained one after the other, their
    gradients summed by autograd.
    """

    def __init__(self, case: Case, rank: RankContext) -> None:
        self._case, self._device, self._steps = case, rank.device, 0
        self.module = Stage(build_layers(case, rank.device))
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._optimizer = OPTIMIZERS[case.optimizer.kind](trained, **_arguments(case))

    def step(self, window: Window, observe: Callable[[Moment], None]) -> StepResult:
        """Train on the whole window."""
        scale = 1 / _counted(window)
        self._optimizer.zero_grad()
        loss = 0.0
        for batch in window:
            size = self._case.microbatch_size
            blocks = (
                torch.split(part, size) for part in (batch.tokens.to(self._device), _targets(batch, self._device))
            )
            for tokens, targets in zip(*blocks, strict=True):
                part = token_loss(self.module(tokens), targets, scale)
                torch.autograd.backward(part)
                loss += part.item()
        observe(Moment.REDUCED)
        self._optimizer.step()
        self._steps += 1
        return StepResult(loss=loss)

    def held(self, kind: Kind) -> Iterable[Held]:
        """Everything, whole."""
        return _held(kind, self.module, self._optimizer.state)

    def steps_done(self) -> int:
        """Optimizer steps since the start of the training."""
        return self._steps
