"""`impl` as a target of the framework: names and calls, nothing else.

With `faults.py`, the only place here that knows more of `invariants` than its schedules. Imports torch when it builds,
not before: the controller of a campaign stays light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariants.errors import Refused
from invariants.target import Fault, Held, Kind, Moment, Promises, StepResult, Window
from invariants.traffic import Traffic

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy

    from impl.config import Config
    from impl.grid import Grid
    from impl.model import Stage
    from impl.trainer import Trainer
    from invariants.case import Case
    from invariants.world.context import RankContext


class Adapter:
    """A `Trainer` of `impl` on one rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def step(self, window: Window, observe: Callable[[Moment], None]) -> StepResult:
        """One optimizer step; every rank knows the loss."""
        return StepResult(self.trainer.step(window, lambda: observe(Moment.REDUCED)))

    def held(self, kind: Kind) -> Iterator[Held]:
        """Parameters whole; gradients and moments as this rank's shards; no masters, no buffers."""
        if kind is Kind.PARAMETER:
            for name, tensor in self.trainer.parameters.items():
                yield Held(name, tensor.detach(), tuple(tensor.shape), trainable=tensor.requires_grad)
        elif kind is Kind.GRADIENT:
            for index, group in enumerate(self.trainer.optimizer.groups):
                for slot, within, flat in group.pieces():
                    shape = tuple(slot.parameter.shape)
                    yield Held(slot.name, group.reduced[within], shape, flat_range=flat, group=index)
        elif kind is Kind.OPTIMIZER:
            for index in range(len(self.trainer.optimizer.groups)):
                yield from self._state(index)

    def _state(self, index: int) -> Iterator[Held]:
        group = self.trainer.optimizer.groups[index]
        buffer = f"stage{self.trainer.grid.pp_index}.group{index}"
        for key, state in group.state.items():
            if key == "step":
                yield Held(buffer, state, (), state_key=key, group=index, role="counter")
                continue
            for slot, within, flat in group.pieces():
                shape = tuple(slot.parameter.shape)
                yield Held(slot.name, state[within], shape, flat_range=flat, state_key=key, group=index)
            start, stop = max(group.start, group.elements), group.stop
            if start < stop:
                padding = state[start - group.start :]
                shape = (group.parameters.numel(),)
                yield Held(buffer, padding, shape, (start, stop), state_key=key, group=index, role="padding")

    def schedule(self) -> list[str]:
        """The row that the executor carries out, with its sends and receives."""
        return [str(cell) for cell in self.trainer.pipeline.row]

    def stages(self) -> list[tuple[int, Stage]]:
        """The one stage of this rank."""
        return [(self.trainer.grid.pp_index, self.trainer.stage)]

    def layer_costs(self) -> list[list[float]]:
        """What the split goes by: given costs, else multiply-adds."""
        from impl.partition import estimated_costs

        config = self.trainer.config
        costs = config.costs or estimated_costs(config.model)
        return [[costs[layer] for layer in stage] for stage in config.stages()]

    def save(self, path: Path) -> None:
        """Write a checkpoint into the folder `path`."""
        self.trainer.save(path)

    def load(self, path: Path) -> None:
        """Read the checkpoint in the folder `path`."""
        self.trainer.load(path)

    def steps_done(self) -> int:
        """Optimizer steps, those before a load included."""
        return self.trainer.steps


class Reference:
    """The whole model on one rank, by autograd and torch's optimizer alone: no pipeline, no shards, no flat buffers.

    A batch is taken apart into the case's replicas x microbatches, whose gradients are summed one after the other.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        import torch

        from impl.model import build_stage, named_parameters

        config = configuration(case)
        layers = range(config.model.depth)
        model = build_stage(config.model, layers, case.seed, frozen=case.frozen, dtype=config.dtype)
        self.model = model.to(device)
        self.parameters = named_parameters(self.model, config.model)
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        kind: type[torch.optim.Optimizer] = kinds[case.optimizer.kind]
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        rule: dict[str, Any] = {"lr": case.optimizer.lr, "weight_decay": case.optimizer.weight_decay}
        self.optimizer = kind(trained, **rule, foreach=False)  # type: ignore[call-arg]
        self.blocks = config.dp * config.microbatches
        self.device = device
        self.steps = 0

    def step(self, window: Window, observe: Callable[[Moment], None]) -> StepResult:
        """One optimizer step."""
        from torch.nn.functional import cross_entropy

        count = max(1, sum(int(batch.mask.sum()) for batch in window))
        self.optimizer.zero_grad()
        total = 0.0
        for batch in window:
            tensors = (
                tensor.to(self.device).chunk(self.blocks) for tensor in (batch.tokens, batch.targets, batch.mask)
            )
            for tokens, targets, mask in zip(*tensors, strict=True):
                losses = cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
                loss = (losses * mask.flatten().to(losses.dtype)).sum() / count
                loss.backward()
                total += float(loss.detach())
        observe(Moment.REDUCED)
        self.optimizer.step()
        self.steps += 1
        return StepResult(total)

    def held(self, kind: Kind) -> Iterator[Held]:
        """Everything whole."""
        for name, tensor in self.parameters.items():
            shape, state = tuple(tensor.shape), self.optimizer.state.get(tensor, {})
            if kind is Kind.PARAMETER:
                yield Held(name, tensor.detach(), shape, trainable=tensor.requires_grad)
            elif kind is Kind.GRADIENT and tensor.grad is not None:
                yield Held(name, tensor.grad, shape)
            elif kind is Kind.OPTIMIZER:
                for key, value in state.items():
                    yield Held(name, value, shape, state_key=key, role="counter" if key == "step" else "value")

    def steps_done(self) -> int:
        """Optimizer steps."""
        return self.steps


class ImplTarget:
    """The embedded default."""

    name = "impl"
    preload = ("impl.trainer", "impl.checkpoint")
    promises = Promises(
        layout="flat",
        resume="bitwise",
        generators=("torch", "python"),
        traffic=Traffic(gradients="reduce-scatter", parameters="gathered"),
    )

    def cases(self) -> SearchStrategy[Case]:
        """Every grid of up to 4 ranks, both schedules, both precisions, all three optimizers."""
        from invariants import strategies

        return strategies.cases(
            schedules=("gpipe", "1f1b"), precisions=("float64", "float32"), optimizers=("adam", "adamw", "sgd")
        )

    def build(self, case: Case, rank: RankContext) -> Adapter:
        """A trainer on this rank; refuses what `Config` refuses."""
        from impl.trainer import Trainer

        config = configuration(case)
        trainer = Trainer(config, _grid(config, case, rank))

        def announce(cell: str) -> None:
            rank.recorder.label = cell

        trainer.pipeline.announce = announce
        return Adapter(trainer)

    def reference(self, case: Case, rank: RankContext) -> Reference:
        """The same training on one process, in the precision of `case`."""
        return Reference(case, rank.device)

    def faults(self) -> Mapping[str, Fault]:
        """Planted faults and harmless variants."""
        from impl.faults import FAULTS

        return FAULTS


def configuration(case: Case) -> Config:
    """The settings of `case`; `Refused` where they are none of `impl`'s."""
    from impl.config import Config
    from impl.grid import ConfigurationError
    from impl.model import GPT
    from impl.zero1 import Rule

    axes = tuple(name for name, _ in case.topology.axes)
    if axes not in ((), ("pp",), ("dp",), ("pp", "dp")):
        raise Refused(f"topology {case.topology}: expected the axes pp and dp, in this order")
    model, optimizer = case.model, case.optimizer
    try:
        return Config(
            pp=case.topology.size("pp"),
            dp=case.topology.size("dp"),
            schedule=case.schedule,
            microbatches=case.microbatches,
            microbatch_size=case.microbatch_size,
            model=GPT(model.layers, model.width, model.heads, model.vocabulary, model.sequence, model.tied),
            split=case.split,
            precision=case.precision,
            rule=Rule(optimizer.kind, optimizer.lr, optimizer.weight_decay),
            frozen=case.frozen,
            seed=case.seed,
        )
    except ConfigurationError as error:
        raise Refused(str(error)) from error


def _grid(config: Config, case: Case, rank: RankContext) -> Grid:
    from impl.grid import Grid

    def group(axis: str) -> torch.distributed.ProcessGroup | None:
        return rank.axis_group(case.topology, axis) if case.topology.size(axis) > 1 else None

    return Grid(config.pp, config.dp, rank.rank, rank.device, group("pp"), group("dp"))


target = ImplTarget()
