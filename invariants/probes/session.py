"""One case on one rank: build, train, and, in fresh processes, load and go on; what is measured goes to the controller.

A session lives in the rank's state between the calls. Values travel by files in a scratch folder, digests and sizes as
results. Before each step the probes draw from torch's, Python's and numpy's generators, and before a load they seed
them anew, so that a random state that is not restored differs. All ranks draw and seed alike: a trainer whose ranks
rely on a common random state keeps it; without one, each rank's state is its own from the start of the world.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from invariants.case import Case, Save
from invariants.errors import Refused, UsageError
from invariants.evidence import Snapshot, State
from invariants.probes.activations import Activations
from invariants.probes.communicated import Communicated
from invariants.probes.data import window_of
from invariants.probes.pieces import digest_of, dump, owned_of, pieces_of, print_of, prints_of
from invariants.probes.records import Built, Stepped, Trained
from invariants.target import (
    Closes,
    Counts,
    HasFaults,
    Kind,
    Moment,
    Pipelines,
    Saves,
    Splits,
    StepResult,
    Target,
    Trainer,
)
from invariants.world.context import RankContext

PARAMETERS, GRADIENTS = "parameters", "gradients"
"""Names of dumps: parameters after a number of steps, and gradients as reduced in the step that follows."""


def build(context: RankContext, target: Target, case: Case, fault: str | None) -> Built:
    """Make the trainer, under the patch of `fault`, and keep it for the calls that follow."""
    patches = ExitStack()
    context.state["patches"] = patches
    if fault is not None:
        if not isinstance(target, HasFaults) or fault not in target.faults():
            return Built(mistake=f"fault {fault!r}: target {target.name} has no such fault")
        patches.enter_context(target.faults()[fault].patch())
    communicated = Communicated(context.recorder)
    try:
        trainer = target.build(case, context)
    except Refused as reason:
        return Built(refused=str(reason))
    except UsageError as mistake:
        return Built(mistake=str(mistake))
    if lacking := [name for name in ("step", "held") if not callable(getattr(trainer, name, None))]:
        found = f"build returned a {type(trainer).__name__} without {' and '.join(lacking)}"
        return Built(mistake=f"target {target.name}: {found}: expected a trainer, see invariants.target.Trainer")
    context.state["session"] = Session(context, target, case, trainer, communicated)
    row = None
    if isinstance(trainer, Pipelines):
        cells = trainer.schedule()
        if isinstance(cells, str) or not isinstance(cells, Iterable):
            found = f"schedule returned a {type(cells).__name__}"
            return Built(mistake=f"target {target.name}: {found}: expected this rank's cells, a list of texts")
        row = tuple(cells)
    layers = None
    if isinstance(trainer, Splits):
        layers = tuple(tuple(map(float, stage)) for stage in trainer.layer_costs())
    return Built(row=row, layers=layers, saves=isinstance(trainer, Saves))


def train(context: RankContext, folder: Path) -> Trained:
    """Run the history from its start; checkpoint and dumps go into `folder`."""
    session: Session = context.state["session"]
    session.folder = folder
    session.snapshot()
    for operation in session.case.history:
        if not isinstance(operation, Save):
            session.step()
        elif isinstance(session.trainer, Saves):
            session.record_state()
            session.trainer.save(folder / "checkpoint")
    session.record_sizes()
    session.record_communication()
    return session.recorded


def resume(context: RankContext, folder: Path, checkpoint: Path) -> Trained:
    """Load, in a world of fresh processes, and run what the history has after its save; dumps go into `folder`."""
    session: Session = context.state["session"]
    assert session.case.save_after is not None
    assert isinstance(session.trainer, Saves)
    session.communicated.goes_on(session.case.save_after)
    _seed(_UNLIKELY_SEED)
    session.scramble()
    session.trainer.load(checkpoint)
    session.folder, session.done, session.loaded = folder, session.case.save_after, True
    session.record_state()
    session.snapshot()
    while session.done < len(session.case.windows):
        session.step()
    session.record_communication()
    return session.recorded


def close(context: RankContext) -> None:
    """End the session, if there is one, and take the fault's patch off."""
    session: Session | None = context.state.pop("session", None)
    with context.state.pop("patches", contextlib.nullcontext()):
        if session is not None:
            session.close()


class Session:
    """A trainer and what was recorded of it."""

    def __init__(
        self, context: RankContext, target: Target, case: Case, trainer: Trainer, communicated: Communicated
    ) -> None:
        self.context, self.target, self.case, self.trainer = context, target, case, trainer
        self.communicated = communicated
        self.activations = Activations(trainer.stages() if isinstance(trainer, Pipelines) else ())
        self.recorded = Trained()
        self.folder = Path()
        self.done = 0
        self.loaded = False

    def step(self) -> None:
        """Train on the next window."""
        rank = self.context.rank
        gradients = dump_path(self.folder, GRADIENTS, self.done, rank)
        _draw()

        def observe(moment: Moment) -> None:
            if moment is not Moment.REDUCED:
                raise UsageError(f"step: observe({moment!r}): expected Moment.REDUCED")
            self.communicated.goes_on(self.done)
            dump(gradients, pieces_of(self.trainer.held(Kind.GRADIENT)))
            self.communicated.goes_on(self.done + 1, inside=True)

        window = window_of(self.target, self.case, self.done)
        self.communicated.goes_on(self.done + 1, inside=True)
        with self.activations.watching():
            result = self.trainer.step(window, observe)
        self.communicated.goes_on(self.done + 1)
        if not isinstance(result, StepResult):
            raise UsageError(f"step returned {type(result).__name__}: expected a StepResult")
        self.done += 1
        finite, skipped = self.snapshot(), bool(result.skipped)
        self.recorded.steps.append(Stepped(self.done, _loss(result), finite, skipped, gradients.exists()))
        self.recorded.peaks += self.activations.peaks(rank, self.done)

    def snapshot(self) -> bool:
        """Record all parameters, by digest and by value; whether they are finite."""
        rank = self.context.rank
        pieces = list(pieces_of(self.trainer.held(Kind.PARAMETER)))
        prints = tuple(print_of(piece) for piece in pieces if piece.values is not None)
        self.recorded.snapshots.append(Snapshot(rank, self.done, self.loaded, prints))
        dump(dump_path(self.folder, PARAMETERS, self.done, rank), pieces)
        return all(bool(piece.values.isfinite().all()) for piece in pieces if piece.values is not None)

    def record_state(self) -> None:
        """Record what a checkpoint must give back."""
        masters = (replace(print_, state_key="master") for print_ in prints_of(self.trainer.held(Kind.MASTER)))
        optimizer = (*prints_of(self.trainer.held(Kind.OPTIMIZER)), *masters)
        steps = _steps(self.trainer.steps_done()) if isinstance(self.trainer, Counts) else None
        generators = tuple((name, GENERATORS[name]()) for name in self.target.promises.generators)
        parameters = prints_of(self.trainer.held(Kind.PARAMETER))
        self.recorded.state = State(self.context.rank, parameters, optimizer, generators, steps)

    def record_sizes(self) -> None:
        """Record place and size of all that is held."""
        for kind in (Kind.PARAMETER, Kind.OPTIMIZER, Kind.MASTER):
            self.recorded.owned += owned_of(self.trainer.held(kind), self.context.rank, kind.value)

    def record_communication(self) -> None:
        """Record what was communicated since before the build."""
        self.recorded.communication = self.communicated.posted(self.context.rank, resumed=self.loaded)

    def scramble(self) -> None:
        """Overwrite all parameters: a load that leaves one out would else find it as the seed made it."""
        generator = torch.Generator().manual_seed(_UNLIKELY_SEED)
        with torch.no_grad():
            for held in self.trainer.held(Kind.PARAMETER):
                if isinstance(held.tensor, torch.Tensor) and held.tensor.is_floating_point():
                    held.tensor.copy_(torch.rand(held.tensor.shape, generator=generator))

    def close(self) -> None:
        """Leave the modules as they were and release what the trainer holds."""
        self.activations.close()
        if isinstance(self.trainer, Closes):
            self.trainer.close()


def _loss(result: StepResult) -> float | None:
    """The reported loss as a number: a tensor or numpy scalar of one element is one as well."""
    try:
        return None if result.loss is None else float(result.loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"step: StepResult.loss is a {type(result.loss).__name__}: expected a number") from error


def _steps(done: object) -> int:
    """The number of steps done, which may be a tensor of one element as well."""
    try:
        return int(done)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"steps_done returned a {type(done).__name__}: expected a number") from error


def dump_path(folder: Path, moment: str, step: int, rank: int) -> Path:
    """The dump of one rank; `step` is the number of steps done."""
    return folder / f"{moment}.{step}.{rank}.safetensors"


_UNLIKELY_SEED = 7919


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _draw() -> None:
    torch.rand(1)
    np.random.random()
    random.random()


def _numpy_state() -> str:
    kind, keys, *rest = np.random.get_state()
    return digest_of(np.asarray(keys).tobytes() + json.dumps([kind, *rest]).encode())


GENERATORS: dict[str, Callable[[], str]] = {
    "torch": lambda: digest_of(torch.get_rng_state().numpy().tobytes()),
    "python": lambda: digest_of(json.dumps(random.getstate()).encode()),
    "numpy": _numpy_state,
}
"""Digest of the state of each generator that a target may promise to restore."""
