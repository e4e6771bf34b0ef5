"""What the ranks of one case recorded: plain data, stored as JSON, readable without torch.

A section is None where it was not recorded: `absent` then says what the target lacks, or `lost` what went wrong.
Element ranges `lo..hi-1` are of the flattened whole of a tensor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from invariants.case import Case
from invariants.communication import Operation
from invariants.target import Promises


class Section(enum.Enum):
    """A part of the evidence that an invariant may need; the value is the attribute of `Evidence`."""

    SCHEDULE = "schedule"
    LAYERS = "layers"
    ACTIVATIONS = "activations"
    LOSSES = "losses"
    REPLICAS = "replicas"
    GRADIENTS = "gradients"
    UPDATES = "updates"
    TRAJECTORY = "trajectory"
    OPTIMIZER = "optimizer"
    RELOAD = "reload"
    RESUME = "resume"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class StagePeak:
    """Microbatches of `stage` whose saved tensors were held: at most during step `step`, and after it."""

    rank: int
    stage: int
    step: int
    peak: int
    left: int


@dataclass(frozen=True)
class Loss:
    """The loss that a rank reported for a step, beside the reference's at the same parameters."""

    rank: int
    step: int
    reported: float | None
    reference: float
    tolerance: float
    finite: bool
    """Whether all parameters that the rank holds after the step are finite."""


@dataclass(frozen=True)
class Print:
    """Digest of one piece of tensor: equal bytes, equal digest. `norm` is its L2 norm, in float64."""

    name: str
    lo: int
    hi: int
    dtype: str
    digest: str
    norm: float
    state_key: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """What one rank holds of its parameters at a point: after `step` steps, or after a load."""

    rank: int
    step: int
    loaded: bool
    prints: tuple[Print, ...]


@dataclass(frozen=True)
class Deviation:
    """The worst element of one tensor in one step, over all ranks: observed value against expected one.

    `rank` is -1 where no rank holds the element; `observed` is then NaN. `missing` tells a tensor that should exist and
    does not. `resumed` tells the run that was loaded from the checkpoint from the uninterrupted one.
    """

    name: str
    step: int
    rank: int
    index: int
    expected: float
    observed: float
    error: float
    tolerance: float
    missing: bool = False
    resumed: bool = False


@dataclass(frozen=True)
class Owned:
    """A piece of a parameter or of optimizer state on one rank: its place and its size in bytes."""

    rank: int
    kind: str
    name: str
    lo: int
    hi: int
    bytes: int
    group: int
    role: str
    trainable: bool
    state_key: str | None = None
    whole: int = 0
    """Elements of the whole tensor that the piece belongs to."""


@dataclass(frozen=True)
class State:
    """What one rank holds that a checkpoint must give back: tensors by digest, random generators, step count."""

    rank: int
    parameters: tuple[Print, ...]
    optimizer: tuple[Print, ...]
    generators: tuple[tuple[str, str], ...]
    steps: int | None


@dataclass(frozen=True)
class Reload:
    """State of each rank when it saved, and of fresh processes that loaded."""

    saved: tuple[State, ...]
    loaded: tuple[State, ...]


@dataclass(frozen=True)
class Resume:
    """Steps after the save, made by the uninterrupted run and by fresh processes that loaded."""

    uninterrupted: tuple[Snapshot, ...]
    resumed: tuple[Snapshot, ...]
    deviations: tuple[Deviation, ...]
    """Gradients and updates of the resumed run against the reference that carries on from before the save."""
    losses: tuple[Loss, ...] = ()
    """Of the resumed run. `reference` is what the rank reported in the uninterrupted run, with a tolerance of 0, where
    the target promises the same bits (NaN where it reported none); else the reference's at the resumed parameters.
    """


@dataclass(frozen=True)
class Posted:
    """What one rank communicated `inside` step `step`, from 1; or else after `step` steps and in none of them: while
    the trainer was built (0), saved or loaded, or held out its tensors.

    `resumed` tells the run that was loaded from the checkpoint from the uninterrupted one; it starts with a build after
    0 steps, as that does. Operations have their numbers and turns from the start of the run. Their times are no seconds
    but whole numbers that rise with each operation that the rank posted, or had waited for, in the run.
    """

    rank: int
    step: int
    inside: bool
    resumed: bool
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Evidence:
    """All that was recorded for one case of one target."""

    target: str
    case: Case
    promises: Promises
    fault: str | None = None
    refused: str | None = None
    absent: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    schedule: tuple[tuple[str, ...], ...] | None = None
    """One row of cells a rank, in rank order."""
    layers: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    """As each rank tells it, in rank order: the cost of each layer of each stage."""
    activations: tuple[StagePeak, ...] | None = None
    losses: tuple[Loss, ...] | None = None
    replicas: tuple[Snapshot, ...] | None = None
    gradients: tuple[Deviation, ...] | None = None
    updates: tuple[Deviation, ...] | None = None
    trajectory: tuple[Deviation, ...] | None = None
    optimizer: tuple[Owned, ...] | None = None
    reload: Reload | None = None
    resume: Resume | None = None
    communication: tuple[Posted, ...] | None = None
    """Lost, not cut short, where a rank communicated more than its record holds."""
