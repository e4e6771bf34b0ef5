"""What the functions of this package return to the controller: plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from invariants.evidence import Deviation, Owned, Posted, Snapshot, StagePeak, State


@dataclass(frozen=True)
class Built:
    """How `build` went: refused, not the target's case at all, or ready, with the rank's row of the schedule and
    the costs of the layers of all stages.
    """

    refused: str | None = None
    mistake: str | None = None
    row: tuple[str, ...] | None = None
    layers: tuple[tuple[float, ...], ...] | None = None
    saves: bool = False


@dataclass(frozen=True)
class Stepped:
    """What a step showed: `loss` as reported; whether all parameters are finite; whether the trainer says that it
    skipped the update; whether it reported its reduced gradients.
    """

    step: int
    loss: float | None
    finite: bool
    skipped: bool
    observed: bool


@dataclass
class Trained:
    """What one rank recorded over the whole history, or over what was left of it after a load.

    `communication` is None where there was more of it than a rank's record holds.
    """

    steps: list[Stepped] = field(default_factory=list)
    peaks: list[StagePeak] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    owned: list[Owned] = field(default_factory=list)
    state: State | None = None
    communication: tuple[Posted, ...] | None = None


@dataclass(frozen=True)
class Expected:
    """The reference's loss in a step, counted from 1, at the parameters that the ranks had."""

    step: int
    loss: float
    tolerance: float


@dataclass
class Analysis:
    """Comparisons of one case; `gradients` and `updates` are None where the trainer never reports its gradients."""

    losses: list[Expected] = field(default_factory=list)
    gradients: list[Deviation] | None = field(default_factory=list)
    updates: list[Deviation] | None = field(default_factory=list)
    trajectory: list[Deviation] | None = None
    resumed: list[Deviation] | None = None
    resumed_losses: list[Expected] = field(default_factory=list)
