"""The code under test, behind an adapter: the Target and Trainer protocols, structurally typed.

What a trainer lacks makes the invariants that need it `not applicable`. Names and calls are the adapter's; the
reference, the launcher, the deadlines and the injected faults are the core's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from invariants.errors import UsageError
from invariants.traffic import Traffic

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy

    from invariants.case import Case
    from invariants.world.context import RankContext


class Moment(enum.Enum):
    """When a trainer calls `observe` inside a step."""

    REDUCED = "reduced"
    """Gradients are reduced over replicas and not yet used by the optimizer, before clipping."""


class Kind(enum.Enum):
    """What `held` is asked for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MASTER = "master"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"


class Missing(enum.Enum):
    """Stands for a tensor that does not exist: a gradient that is missing is not a zero."""

    MISSING = "missing"


MISSING = Missing.MISSING


@dataclass(frozen=True)
class Held:
    """One tensor that a rank holds, and where it sits in the whole.

    `name` is the global name of the parameter that it is or belongs to, the same on all ranks; pieces of one name that
    cover the same elements on several ranks are replicas. The piece is the whole where `flat_range` and `slices` are
    None; `flat_range=(a, b)` is elements a..b-1 of the flattened whole; `slices` is one (start, stop) a dimension.
    Optimizer state carries its `state_key` (`exp_avg`) and its parameter group. `role` tells values from `padding`
    (elements that belong to no parameter; `name` is then the buffer's) and from step `counter`s.
    `trainable` is False for frozen parameters.
    """

    name: str
    tensor: torch.Tensor | Missing
    global_shape: tuple[int, ...]
    flat_range: tuple[int, int] | None = None
    slices: tuple[tuple[int, int], ...] | None = None
    state_key: str | None = None
    group: int = 0
    role: Literal["value", "padding", "counter"] = "value"
    trainable: bool = True


@dataclass(frozen=True)
class GlobalBatch:
    """Token ids, targets and weights of one global batch, each [batch, sequence]; the same on every rank.

    `mask` is 1 where a token counts in the loss, else 0. The loss of a window is the sum of the cross entropies of the
    tokens that count, over all its batches, divided by their number (by 1 where none counts).
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor


Window = Sequence[GlobalBatch]
"""One optimizer step's worth of global batches; a global token mean needs all of them."""


@dataclass(frozen=True)
class StepResult:
    """What a step reports; `loss` and `grad_norm` are None on a rank that does not know them."""

    loss: float | None
    grad_norm: float | None = None
    skipped: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Promises:
    """What a target declares of itself; invariants judge against it.

    `layout`: how optimizer state is sharded over `dp`: `flat` (equal shards of one flat buffer a parameter group,
    padded to a multiple of dp x `alignment` elements), `whole-parameter` (each parameter's state on one rank),
    `replicated`. `masters`: whether fp32 master copies are held besides. `resume`: whether a resumed run has the same
    bits as the uninterrupted one, or agrees within the tolerance rule. `lowering`: how a schedule that lists
    computation only is turned into sends and receives, by the name that `invariants.schedule.lowering` gives it;
    None where the schedule contains them already, or nobody knows. `generators`: whose random states a checkpoint gives
    back to each rank. `state_tensors`: tensors of optimizer state for each parameter, counters aside; None where they
    are those of torch's optimizer of the case's kind with its defaults (2 for adam and adamw, 0 for sgd). `traffic`:
    what a step communicates; None where that is not promised.
    """

    def __post_init__(self) -> None:
        allowed: Mapping[str, Sequence[object]] = {
            "layout": ("flat", "whole-parameter", "replicated"),
            "resume": ("bitwise", "tolerance"),
            "masters": (True, False),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                expected = ", ".join(map(repr, values))
                raise UsageError(f"promises: {name}={getattr(self, name)!r}: expected one of {expected}")
        for name in self.generators:
            if name not in ("torch", "python", "numpy"):
                raise UsageError(f"promises: generator {name!r}: expected 'torch', 'python' or 'numpy'")
        if self.alignment < 1:
            raise UsageError(f"promises: alignment={self.alignment}: expected 1 or more")
        if self.state_tensors is not None and self.state_tensors < 0:
            raise UsageError(f"promises: state_tensors={self.state_tensors}: expected 0 or more, or None")

    layout: Literal["flat", "whole-parameter", "replicated"] = "replicated"
    alignment: int = 1
    masters: bool = False
    resume: Literal["bitwise", "tolerance"] = "tolerance"
    lowering: str | None = None
    generators: tuple[Literal["torch", "python", "numpy"], ...] = ("torch",)
    state_tensors: int | None = None
    traffic: Traffic | None = None


class Trainer(Protocol):
    """A model in training on one rank, as `Target.build` returned it."""

    def step(self, window: Window, observe: Callable[[Moment], None]) -> StepResult:
        """Train on one window; call `observe` at each `Moment` that can be reached."""

    def held(self, kind: Kind) -> Iterable[Held]:
        """What this rank holds of `kind`, now."""


@runtime_checkable
class Saves(Protocol):
    """A trainer that writes checkpoints; `path` is one folder for all ranks."""

    def save(self, path: Path) -> None:
        """Write; every rank calls it."""

    def load(self, path: Path) -> None:
        """Read into a freshly built trainer; every rank calls it."""


@runtime_checkable
class Counts(Protocol):
    """A trainer that knows how many optimizer steps it has made; part of a checkpoint."""

    def steps_done(self) -> int:
        """Optimizer steps since the start of the training, resumed ones included."""


@runtime_checkable
class Pipelines(Protocol):
    """A trainer with a pipeline."""

    def schedule(self) -> Sequence[str]:
        """This rank's row for one global batch, in program order, as cells of `invariants.schedule.actions`.

        Computation only, or lowered: with its sends and receives where the program posts them. Called after `build`,
        before any communication of a step.
        """

    def stages(self) -> Sequence[tuple[int, torch.nn.Module]]:
        """Stage index and module of each stage of this rank; each call of the module is one microbatch's forward."""


@runtime_checkable
class Splits(Protocol):
    """A trainer that divides its layers into stages itself, by what they cost."""

    def layer_costs(self) -> Sequence[Sequence[float]]:
        """Cost of each layer of each stage, all stages in their order, the same on every rank.

        A cost is the time or the work of a layer for one microbatch, forward and backward, in any unit; an embedding
        and a head are layers of their own.
        """


@runtime_checkable
class Closes(Protocol):
    """A trainer that holds more than memory."""

    def close(self) -> None:
        """Release what it holds; called once, after success and after failure."""


@dataclass(frozen=True)
class Fault:
    """A planted wrong line, or a harmless variant.

    `report` is the public report that the fault stands for, or why the variant is harmless. `patch` is entered on each
    rank before `build`, and left after the run. `applies` tells in which cases it changes anything.
    """

    report: str
    patch: Callable[[], AbstractContextManager[object]]
    harmless: bool = False
    applies: Callable[[Case], bool] = lambda _case: True


class Target(Protocol):
    """The code under test."""

    @property
    def name(self) -> str:
        """Short name for reports."""

    @property
    def promises(self) -> Promises:
        """What the target declares of itself."""

    def cases(self) -> SearchStrategy[Case]:
        """The cases that make sense for it, from `invariants.strategies`."""

    def build(self, case: Case, rank: RankContext) -> Trainer:
        """Make a trainer on this rank; raise `invariants.Refused` to decline the case before communicating."""


@runtime_checkable
class Feeds(Protocol):
    """A target whose trainer wants other data than random tokens."""

    def window(self, case: Case, step: int) -> Window:
        """The global batches of optimizer step `step`, counted from 0; the same on every rank and at every call."""


@runtime_checkable
class Preloads(Protocol):
    """A target that imports what takes long before ranks are forked, not on each of them."""

    @property
    def preload(self) -> Sequence[str]:
        """Modules for the process that ranks are forked from; importing them starts no thread and computes nothing."""


@runtime_checkable
class HasFaults(Protocol):
    """A target with planted faults and harmless variants."""

    def faults(self) -> Mapping[str, Fault]:
        """Faults by name."""


@runtime_checkable
class HasUpdateRule(Protocol):
    """A target that updates otherwise than torch's optimizer of the case's kind with its defaults."""

    def update_rule(self, case: Case, parameters: Mapping[str, torch.Tensor]) -> Callable[[], object]:
        """A function that makes one update of `parameters`, whole tensors by name, from their `.grad`, in place.

        The gradients are the reduced ones of the whole model, before clipping; what the rule does with them, clip,
        decay, change the rate with the step, is written here once more, without shards. It is called once a step.
        """


@runtime_checkable
class HasKnown(Protocol):
    """A target with violations that are known and reported."""

    def known(self) -> Path:
        """A file of known violations, see `invariants.known`."""


@runtime_checkable
class HasReference(Protocol):
    """A target with an independent single-process reference; else its own `build` on one rank serves."""

    def reference(self, case: Case, rank: RankContext) -> Trainer:
        """A single-process trainer of the whole model, in `case.precision`, with the same initial values.

        Its `held` names are the target's; it must accept `PARAMETER` values through `Tensor.copy_` on what
        `held(Kind.PARAMETER)` yields.
        """
