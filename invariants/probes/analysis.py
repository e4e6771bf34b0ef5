"""What the dumps of all ranks say beside the reference; runs in a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from invariants.case import Case, Precision
from invariants.evidence import Deviation
from invariants.probes.data import window_of
from invariants.probes.records import Analysis, Expected
from invariants.probes.reference import DTYPES, Reference, ReferenceOptimizer
from invariants.probes.session import GRADIENTS, PARAMETERS
from invariants.probes.whole import Values, Whole, compare, gather, largest, tolerances, unit_roundoff
from invariants.target import Target
from invariants.world.context import RankContext

ADAM_EPS = 1e-8
ROUGH: Precision = "float32"
"""What rounding does is measured here, where float64 is exact; its errors are scaled to the case's precision."""
NUDGES, ROUNDINGS = 2, 4
"""Evaluations at parameters that are off, and by how many roundings: about what a layer's own arithmetic makes."""


def analyse(
    context: RankContext, target: Target, case: Case, trained: Path, resumed: Path | None, skipped: frozenset[int]
) -> Analysis:
    """Compare each step of the run that dumped into `trained`, and of the one into `resumed`, with the reference.

    `skipped` are the steps, counted from 1, of which all ranks say that they made no update.
    """
    judge = Judge(context, target, case, skipped)
    analysis = Analysis()
    steps = len(case.windows)
    for step in range(steps):
        judge.step(trained, step, analysis, resumed=False)
    if case.precision == "float64":
        analysis.trajectory = judge.trajectory(trained)
    if resumed is not None and case.save_after is not None and analysis.gradients is not None:
        judge.start_again(trained, case.save_after)
        later = Analysis()
        for step in range(case.save_after, steps):
            judge.step(resumed, step, later, resumed=True)
        analysis.resumed = [*(later.gradients or ()), *(later.updates or ())]
        analysis.resumed_losses = later.losses
    return analysis


class Judge:
    """The references of one case, and the optimizers' state that they carry from step to step."""

    def __init__(self, context: RankContext, target: Target, case: Case, skipped: frozenset[int]) -> None:
        self.context, self.target, self.case, self.skipped = context, target, case, skipped
        self.dtype = DTYPES[case.precision]
        self.exact = Reference(target, case, context, "float64")
        self.rounded = Reference(target, case, context, ROUGH, decomposed=True)
        self.nudged = Reference(target, case, context, ROUGH)
        self.optimizers = self._optimizers()
        self.gradient_limit = 0.0
        self._gathered: dict[tuple[Path, int], dict[str, Whole]] = {}

    def _optimizers(self) -> list[ReferenceOptimizer]:
        """Exact, and in the case's precision."""
        dtypes, shapes = (torch.float64, self.dtype), self.exact.trained
        return [ReferenceOptimizer(self.target, self.case, shapes, dtype) for dtype in dtypes]

    def start_again(self, folder: Path, steps: int) -> None:
        """Bring the optimizers to where they were after `steps` steps of the run in `folder`, by the same gradients."""
        self.optimizers = self._optimizers()
        for step in range(steps):
            gradients = gather(folder, GRADIENTS, step, self.case.topology.world_size)
            start = {name: whole.values for name, whole in self._parameters(folder, step).items()}
            self._updated(start, gradients or {}, step + 1)

    def step(self, folder: Path, step: int, analysis: Analysis, *, resumed: bool) -> None:
        """Judge one step, at the parameters and with the gradients that the ranks had."""
        before, after = self._parameters(folder, step), self._parameters(folder, step + 1)
        gradients = gather(folder, GRADIENTS, step, self.case.topology.world_size)
        start = {name: whole.values for name, whole in before.items()}
        loss, exact = self._at(self.exact, start, step)
        losses, rounded = zip(*self._rounded(start, step), strict=True)
        unit = unit_roundoff(self.dtype)
        scale = unit / unit_roundoff(DTYPES[ROUGH])
        errors = [16 * unit * max(1.0, abs(loss)), *(8 * scale * abs(other - loss) for other in losses)]
        analysis.losses.append(Expected(step + 1, loss, max(errors)))
        limits = tolerances(exact, rounded, DTYPES[ROUGH], scale)
        self.gradient_limit = max([self.gradient_limit, *limits.values()])
        if gradients is None or analysis.gradients is None or analysis.updates is None:
            analysis.gradients = analysis.updates = None
            return
        analysis.gradients += compare(gradients, exact, limits, step + 1, resumed=resumed)
        analysis.updates += self._updates(start, gradients, after, step + 1, resumed)

    def _at(self, reference: Reference, parameters: Values, step: int) -> tuple[float, dict[str, Tensor]]:
        reference.set(parameters)
        return reference.step(window_of(self.target, self.case, step))

    def _rounded(self, parameters: Values, step: int) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """The same step with rounding errors: cut as the case is, and from parameters that are off by a few roundings.
        The first alone may be right by luck where a small error in makes a large one out.
        """
        yield self._at(self.rounded, parameters, step)
        generator = torch.Generator().manual_seed(step)
        nudge = ROUNDINGS * unit_roundoff(DTYPES[ROUGH])
        for _ in range(NUDGES):
            signs = {
                name: torch.randint(2, values.shape, generator=generator) * 2 - 1 for name, values in parameters.items()
            }
            nudged = {name: values.double() * (1 + nudge * signs[name]) for name, values in parameters.items()}
            yield self._at(self.nudged, nudged, step)

    def _parameters(self, folder: Path, step: int) -> dict[str, Whole]:
        """After `step` steps; what comes after one step comes before the next."""
        if (folder, step) not in self._gathered:
            found = gather(folder, PARAMETERS, step, self.case.topology.world_size)
            assert found is not None  # every rank writes them, or has failed
            self._gathered[folder, step] = found
        return self._gathered[folder, step]

    def _updates(
        self, start: Values, gradients: Mapping[str, Whole], after: Mapping[str, Whole], step: int, resumed: bool
    ) -> list[Deviation]:
        expected, rounded = self._updated(start, gradients, step)
        limits = tolerances(expected, [rounded], self.dtype)
        limits.update((name, 0.0) for name in start.keys() - set(self.exact.trained))
        return list(compare(after, expected, limits, step, resumed=resumed))

    def _updated(
        self, start: Values, gradients: Mapping[str, Whole], step: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters after the update, exact and rounded; a skip is believed where a gradient is not finite."""
        expected, rounded = dict(start), dict(start)
        finite = all(bool(whole.values.isfinite().all()) for whole in gradients.values())
        if finite or step not in self.skipped:
            observed = {name: whole.values if whole.present else None for name, whole in gradients.items()}
            for optimizer, values in zip(self.optimizers, (expected, rounded), strict=True):
                values.update(optimizer.update(start, observed))
        return expected, rounded

    def trajectory(self, folder: Path) -> list[Deviation]:
        """Judge parameters after each step against a reference that went its own way from the first ones."""
        found: list[Deviation] = []
        first = {name: whole.values for name, whole in self._parameters(folder, 0).items()}
        free = Reference(self.target, self.case, self.context, "float64")
        optimizer = ReferenceOptimizer(self.target, self.case, free.trained, torch.float64)
        parameters = dict(first)
        for step in range(len(self.case.windows)):
            _, gradients = self._at(free, parameters, step)
            given = {name: None if name in free.unused else value for name, value in gradients.items()}
            parameters.update(optimizer.update(parameters, given))
            limit = self._drift(step + 1, largest(parameters.values()))
            after = self._parameters(folder, step + 1)
            found += compare(after, parameters, dict.fromkeys(parameters, limit), step + 1, resumed=False)
        return found

    def _drift(self, steps: int, size: float) -> float:
        """How far rounding can carry right code: Adam divides by as little as its eps, and so multiplies an error."""
        gain = 1.0 if self.case.optimizer.kind == "sgd" else 1 / ADAM_EPS
        update = 2 * self.case.optimizer.lr * self.gradient_limit * gain
        return steps * (16 * unit_roundoff(self.dtype) * size + update)
