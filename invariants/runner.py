"""Runs one case on real worlds and puts together its evidence."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from invariants.case import Case
from invariants.errors import UsageError, WorldError
from invariants.evidence import Evidence, Loss, Reload, Resume, Section
from invariants.probes.records import Analysis, Built, Expected, Trained
from invariants.target import Preloads
from invariants.world.failure import RankFailed

if TYPE_CHECKING:
    from invariants.target import Target
    from invariants.world.context import RankContext
    from invariants.world.pool import WorldPool
    from invariants.world.world import World

_Result = TypeVar("_Result")
_MISTAKE = f"{UsageError.__module__}.{UsageError.__qualname__}"
_COMPARED = (Section.LOSSES, Section.GRADIENTS, Section.UPDATES, Section.TRAJECTORY)
_RELOADED = (Section.RELOAD, Section.RESUME)


def preloaded(target: Target) -> tuple[str, ...]:
    """Modules that each rank of a campaign needs: for the pool to import once, where ranks are forked."""
    own = target.preload if isinstance(target, Preloads) else ()
    return ("invariants.runner", "invariants.probes.session", "invariants.probes.analysis", *own)


class Runner:
    """Evidence of single cases of `target`, from the worlds of `pool`.

    The history runs on a warm world; what comes after its save once more on a world of fresh processes that load; a
    world of one rank then compares the dumps of both with the reference. `folder` is for these dumps, and empty after
    each case. `deadline_s` bounds each of these calls; None leaves it to the pool.
    """

    def __init__(self, pool: WorldPool, target: Target, folder: Path, deadline_s: float | None = None) -> None:
        self._pool = pool
        self._target = target
        self._folder = folder
        self._deadline_s = deadline_s

    def __call__(self, case: Case, fault: str | None = None) -> Evidence:
        """Run `case`, under the patch of `fault` if one is named.

        What ranks do wrong is in the evidence: the sections that got lost with them. Raises `UsageError` for a case
        that is none of the target's and a fault that it does not have.
        """
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="case-") as folder:
            return _Run(self._pool, self._target, case, fault, Path(folder), self._deadline_s).evidence()


class _Run:
    """One case."""

    def __init__(
        self, pool: WorldPool, target: Target, case: Case, fault: str | None, folder: Path, deadline_s: float | None
    ) -> None:
        self.pool, self.target, self.case, self.fault, self.folder = pool, target, case, fault, folder
        self.deadline_s = deadline_s
        self.refused: str | None = None
        self.saves = False
        self.found: dict[Section, Any] = {}
        self.absent: dict[Section, str] = {}
        self.lost: dict[Section, str] = {}

    def evidence(self) -> Evidence:
        """Run all of it."""
        for name in ("trained", "resumed"):
            (self.folder / name).mkdir()
        size = self.case.topology.world_size
        trained = self._guarded(Section, lambda: self._train(self.pool.get(size)))
        if trained is not None:
            later = (*_RELOADED, Section.COMMUNICATION)
            resumed = self._guarded(later, lambda: self._resume(trained)) if self.saves else None
            self._note_communication(*trained, *(resumed or ()))
            self._guarded(_COMPARED, lambda: self._compare(trained, resumed))
        return Evidence(
            target=self.target.name,
            case=self.case,
            promises=self.target.promises,
            fault=self.fault,
            refused=self.refused,
            absent={section.value: reason for section, reason in self.absent.items()},
            lost={section.value: reason for section, reason in self.lost.items()},
            **{section.value: value for section, value in self.found.items()},
        )

    def _guarded(self, sections: Iterable[Section], work: Callable[[], _Result | None]) -> _Result | None:
        """Do `work`; where a world fails in it, `sections` are lost, as far as they were not found before."""
        try:
            return work()
        except WorldError as failure:
            lost = [section for section in sections if section not in self.found and section not in self.absent]
            self.lost.update(dict.fromkeys(lost, _told(failure)))
            return None

    def _train(self, world: World) -> list[Trained] | None:
        with self._session(world):
            if not self._build(world):
                return None
            trained: list[Trained] = self._call(world, _train_on_rank, self.folder / "trained")
        if Section.ACTIVATIONS not in self.absent:
            self.found[Section.ACTIVATIONS] = _chained(rank.peaks for rank in trained)
        self.found[Section.REPLICAS] = snapshots = _chained(rank.snapshots for rank in trained)
        if not any(snapshot.prints for snapshot in snapshots):
            raise UsageError(f"target {self.target.name}: held(Kind.PARAMETER) yields nothing on any rank")
        self.found[Section.OPTIMIZER] = _chained(rank.owned for rank in trained)
        return trained

    def _build(self, world: World) -> bool:
        """Build on all ranks; whether there is a trainer to go on with."""
        built: list[Built] = self._call(world, _build_on_rank, self.target, self.case, self.fault)
        if mistake := next((rank.mistake for rank in built if rank.mistake), None):
            raise UsageError(mistake)
        refusals = [rank.refused for rank in built]
        if all(reason is not None for reason in refusals):
            self.refused = refusals[0] or "without a reason"
            return False
        if any(reason is not None for reason in refusals):
            raise WorldError(f"some ranks refused the case and others did not: {refusals}")
        rows = [rank.row for rank in built if rank.row is not None]
        if len(rows) == len(built):
            self.found[Section.SCHEDULE] = tuple(rows)
        else:
            reason = f"target {self.target.name}: its trainer has no pipeline"
            self.absent |= dict.fromkeys((Section.SCHEDULE, Section.ACTIVATIONS), reason)
        layers = [rank.layers for rank in built if rank.layers is not None]
        if len(layers) == len(built):
            self.found[Section.LAYERS] = tuple(layers)
        else:
            self.absent[Section.LAYERS] = f"target {self.target.name}: its trainer does not tell what its layers cost"
        self.saves = built[0].saves and self.case.save_after is not None
        if not self.saves:
            lacks = f"target {self.target.name}: its trainer does not save"
            reason = "the history does not save" if built[0].saves else lacks
            self.absent |= dict.fromkeys(_RELOADED, reason)
        return True

    def _resume(self, trained: Sequence[Trained]) -> list[Trained]:
        world = self.pool.fresh(self.case.topology.world_size)
        try:
            with self._session(world):
                if not self._build(world):
                    reason, self.refused = self.refused, None
                    raise WorldError(f"the target refused in fresh processes what it had built before: {reason}")
                checkpoint = self.folder / "trained" / "checkpoint"
                resumed: list[Trained] = self._call(world, _resume_on_rank, self.folder / "resumed", checkpoint)
        finally:
            world.close()
        snapshots = _chained(rank.snapshots for rank in resumed)
        states = [tuple(rank.state for rank in run if rank.state is not None) for run in (trained, resumed)]
        self.found[Section.RELOAD] = Reload(*states)
        save_after = self.case.save_after or 0
        uninterrupted = tuple(s for s in self.found[Section.REPLICAS] if s.step > save_after)
        later = tuple(s for s in snapshots if s.step > save_after)
        self.found[Section.RESUME] = Resume(uninterrupted, later, (), _same_losses(trained, resumed))
        self.found[Section.REPLICAS] += snapshots
        return resumed

    def _compare(self, trained: Sequence[Trained], resumed: Sequence[Trained] | None) -> None:
        skips = [frozenset(seen.step for seen in rank.steps if seen.skipped) for rank in trained]
        judged = resumed is not None and self.target.promises.resume == "tolerance"
        folders = (self.folder / "trained", self.folder / "resumed" if judged else None)
        if judged:
            resume: Resume = self.found.pop(Section.RESUME)
            self.lost[Section.RESUME] = "its comparison with the reference was not made"
        world = self.pool.get(1)
        with self._session(world):
            (analysis,) = self._call(
                world,
                _analyse_on_rank,
                self.target,
                self.case,
                *folders,
                frozenset.intersection(*skips),
            )
        self.found[Section.LOSSES] = _losses(trained, analysis.losses)
        self._note_gradients(trained, analysis)
        if analysis.trajectory is not None:
            self.found[Section.TRAJECTORY] = tuple(analysis.trajectory)
        else:
            self.absent[Section.TRAJECTORY] = f"precision {self.case.precision}: only float64 tells right from wrong"
        if judged and resumed is not None and analysis.resumed is not None:
            del self.lost[Section.RESUME]
            losses = _losses(resumed, analysis.resumed_losses)
            self.found[Section.RESUME] = replace(resume, deviations=tuple(analysis.resumed), losses=losses)

    def _note_gradients(self, trained: Sequence[Trained], analysis: Analysis) -> None:
        silent = [(rank, seen.step) for rank, run in enumerate(trained) for seen in run.steps if not seen.observed]
        if analysis.gradients is not None and analysis.updates is not None:
            self.found[Section.GRADIENTS] = tuple(analysis.gradients)
            self.found[Section.UPDATES] = tuple(analysis.updates)
        elif len(silent) == sum(len(run.steps) for run in trained):
            reason = f"target {self.target.name}: its trainer does not report its reduced gradients"
            self.absent |= dict.fromkeys((Section.GRADIENTS, Section.UPDATES), reason)
        else:
            rank, step = silent[0]
            reason = f"rank {rank} did not report its reduced gradients in step {step}; elsewhere they were reported"
            self.lost |= dict.fromkeys((Section.GRADIENTS, Section.UPDATES), reason)

    def _note_communication(self, *ranks: Trained) -> None:
        if any(rank.communication is None for rank in ranks):
            self.lost[Section.COMMUNICATION] = "a rank communicated more than its record holds"
        elif Section.COMMUNICATION not in self.lost:
            self.found[Section.COMMUNICATION] = _chained(rank.communication or () for rank in ranks)

    @contextlib.contextmanager
    def _session(self, world: World) -> Iterator[None]:
        """Undo on the ranks what was done: a fault's patch must not outlive its case there."""
        try:
            yield
        except RankFailed:
            raise  # the ranks are gone, and their patches with them
        except BaseException:
            if world.pids:  # a Ctrl-C has ended them
                self._call(world, _close_on_rank)
            raise
        self._call(world, _close_on_rank)
        world.reset()

    def _call(self, world: World, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return world.run(function, *arguments, deadline_s=self.deadline_s)


def _told(failure: WorldError) -> str:
    """A mistake in what a target hands over is one line: a traceback would show where it was noticed, not made."""
    if isinstance(failure, RankFailed) and failure.failures[0].type_name == _MISTAKE:
        return f"rank {failure.failures[0].rank}: {failure.failures[0].message}"
    return str(failure)


def _chained(parts: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(parts))


def _losses(runs: Sequence[Trained], expected: Iterable[Expected]) -> tuple[Loss, ...]:
    """What each rank reported, beside the reference."""
    by_step = {each.step: each for each in expected}
    return tuple(
        Loss(rank, seen.step, seen.loss, by_step[seen.step].loss, by_step[seen.step].tolerance, seen.finite)
        for rank, run in enumerate(runs)
        for seen in run.steps
    )


def _same_losses(trained: Sequence[Trained], resumed: Sequence[Trained]) -> tuple[Loss, ...]:
    """What each rank reported after the load, beside what it reported in the same step without one."""
    before = {(rank, seen.step): seen.loss for rank, run in enumerate(trained) for seen in run.steps}
    return tuple(
        Loss(rank, seen.step, seen.loss, math.nan if reference is None else reference, 0.0, seen.finite)
        for rank, run in enumerate(resumed)
        for seen in run.steps
        for reference in [before[rank, seen.step]]
    )


# On the ranks: what is imported here would bring torch into the controller.


def _build_on_rank(context: RankContext, target: Target, case: Case, fault: str | None) -> Built:
    from invariants.probes.session import build

    return build(context, target, case, fault)


def _train_on_rank(context: RankContext, folder: Path) -> Trained:
    from invariants.probes.session import train

    return train(context, folder)


def _resume_on_rank(context: RankContext, folder: Path, checkpoint: Path) -> Trained:
    from invariants.probes.session import resume

    return resume(context, folder, checkpoint)


def _analyse_on_rank(
    context: RankContext, target: Target, case: Case, trained: Path, resumed: Path | None, skipped: frozenset[int]
) -> Analysis:
    from invariants.probes.analysis import analyse

    return analyse(context, target, case, trained, resumed, skipped)


def _close_on_rank(context: RankContext) -> None:
    from invariants.probes.session import close

    close(context)
