"""ZeRO-1: each replica keeps the optimizer state of one shard, updates it, and gathers the others' updates.

Source: Rajbhandari et al., arXiv:1910.02054, section 5.1 (P_os). Reduction and update in one:

    gradients --reduce-scatter--> own shard --Adam--> own shard of parameters --all-gather--> parameters

which moves as many bytes as an all-reduce. The parameters of a group lie in one flat buffer, padded to a multiple of
dp: rank i owns the i-th of dp equal parts. Parameters and their gradients are views of the buffers: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.grid import ConfigurationError, Grid


@dataclass(frozen=True)
class Rule:
    """The update: `adam`, `adamw` or `sgd`; other settings as torch's defaults."""

    kind: str = "adam"
    lr: float = 1e-2
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("adam", "adamw", "sgd"):
            raise ConfigurationError(f"optimizer={self.kind}: expected one of adam, adamw, sgd")
        if not (self.lr >= 0 and self.weight_decay >= 0):
            raise ConfigurationError(f"lr={self.lr}, weight_decay={self.weight_decay}: expected 0 or more")

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state that is kept for each element."""
        return () if self.kind == "sgd" else ("exp_avg", "exp_avg_sq")

    def optimizer(self, tensor: Tensor) -> torch.optim.Optimizer:
        """The optimizer of torch for one flat tensor."""
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        kind: type[torch.optim.Optimizer] = kinds[self.kind]
        return kind([tensor], lr=self.lr, weight_decay=self.weight_decay, fused=True)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its flat buffer: elements start..stop-1."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


def shard_range(elements: int, dp: int, index: int) -> tuple[int, int]:
    """Elements of the padded buffer that replica `index` owns; each owns ceil(elements / dp)."""
    size = -(-elements // dp)
    return index * size, (index + 1) * size


class FlatGroup:
    """The parameters of one dtype in one flat buffer, and the optimizer of this rank's shard of it.

    `parameters` and `gradients` have dp * S elements, `shard` and `reduced` S = ceil(elements / dp).
    """

    def __init__(self, named: Mapping[str, nn.Parameter], grid: Grid, rule: Rule) -> None:
        self.grid = grid
        self.elements = sum(parameter.numel() for parameter in named.values())
        self.start, self.stop = shard_range(self.elements, grid.dp, grid.dp_index)
        example = next(iter(named.values()))
        self.parameters = torch.zeros(grid.dp * (self.stop - self.start), dtype=example.dtype, device=grid.device)
        self.gradients = torch.zeros_like(self.parameters)
        self.slots = tuple(self._place(named))
        self.shard = self.parameters[self.start : self.stop]
        self.reduced = self.gradients if grid.dp == 1 else torch.zeros_like(self.shard)
        self.shard.grad = self.reduced
        self.optimizer = rule.optimizer(self.shard)
        self.state: dict[str, Tensor] = {key: torch.zeros_like(self.shard) for key in rule.moments}
        if self.state:  # made now, not at the first update, so that a checkpoint always holds and loads the same set
            self.state["step"] = torch.zeros((), dtype=torch.float32, device=grid.device)
            self.optimizer.state[self.shard] = self.state

    def _place(self, named: Mapping[str, nn.Parameter]) -> Iterator[Slot]:
        start = 0
        for name, parameter in named.items():
            stop = start + parameter.numel()
            view = self.parameters[start:stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradients[start:stop].view(parameter.shape)
            yield Slot(name, parameter, start, stop)
            start = stop

    def reduce(self) -> None:
        """Sum the gradients over replicas into `reduced`.

        gloo's reduce-scatter is slower than its all-reduce; an all-to-all and a sum in rank order is faster than both,
        and adds in the same order each time.
        """
        if self.grid.dp == 1 or not self.elements:
            return
        if self.grid.device.type == "cuda":
            dist.reduce_scatter_single(self.reduced, self.gradients, group=self.grid.dp_group)
            return
        parts = torch.empty_like(self.gradients)
        dist.all_to_all_single(parts, self.gradients, group=self.grid.dp_group)
        first, *others = parts.chunk(self.grid.dp)
        self.reduced.copy_(first)
        for part in others:
            self.reduced += part

    def update(self) -> None:
        """Update the own shard, in place in the parameters."""
        if self.elements:
            self.optimizer.step()

    def gather(self) -> None:
        """Fetch the other replicas' shards into the parameters."""
        if self.grid.dp > 1 and self.elements:
            dist.all_gather_single(self.parameters, self.shard, group=self.grid.dp_group)

    def pieces(self) -> Iterator[tuple[Slot, slice, tuple[int, int]]]:
        """What the shard holds: the slot, where in the shard, and which elements of the flattened parameter."""
        for slot in self.slots:
            start, stop = max(slot.start, self.start), min(slot.stop, self.stop)
            if start < stop:
                yield slot, slice(start - self.start, stop - self.start), (start - slot.start, stop - slot.start)


class Zero1:
    """The optimizer of one stage.

    `named` are the stage's parameters by global name; those that are not trained are left out. `shared` names weights
    that another stage holds as well: they get a group of their own, so that they lie alike in both stages' shards, and
    vectorised arithmetic, whose last bits may depend on the offset, treats both copies alike.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], grid: Grid, rule: Rule, shared: Iterable[str] = ()) -> None:
        shared = set(shared)
        parts: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name, parameter in named.items():
            if parameter.requires_grad:
                parts.setdefault((parameter.dtype, name in shared), {})[name] = parameter
        self.groups = [FlatGroup(part, grid, rule) for part in parts.values()]
        self.moments = len(rule.moments)

    def clear(self) -> None:
        """Zero the gradients: at the start of each window."""
        for group in self.groups:
            group.gradients.zero_()

    def reduce(self) -> None:
        """Sum gradients over replicas, each rank its shard."""
        for group in self.groups:
            group.reduce()

    def update(self) -> None:
        """Update the own shards."""
        for group in self.groups:
            group.update()

    def gather(self) -> None:
        """Bring all shards of the parameters to this rank."""
        for group in self.groups:
            group.gather()

    def tensors(self) -> dict[str, Tensor]:
        """What this rank alone is responsible for: its shards of parameters and state, by name; not copies."""
        return {
            f"group{index}.{key}": tensor
            for index, group in enumerate(self.groups)
            for key, tensor in {"parameters": group.shard, **group.state}.items()
        }

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank, step counters aside."""
        return sum(tensor.nbytes for group in self.groups for key, tensor in group.state.items() if key != "step")

    def formula_bytes(self) -> int:
        """What ZeRO-1 promises: moments x bytes an element x ceil(P_g / D), summed over groups g."""
        return sum(
            self.moments * group.parameters.element_size() * -(-group.elements // group.grid.dp)
            for group in self.groups
        )

    def layout(self) -> list[dict[str, object]]:
        """Shard offsets and the parameters' places in each flat buffer, as JSON."""
        return [
            {
                "dtype": str(group.parameters.dtype).removeprefix("torch."),
                "elements": group.elements,
                "padded": group.parameters.numel(),
                "shard": [group.start, group.stop],
                "parameters": {slot.name: [slot.start, slot.stop] for slot in group.slots},
            }
            for group in self.groups
        ]
