"""The data that every rank, and the reference, is given: a function of the case and the step alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from invariants.case import Case, Mask
from invariants.errors import UsageError
from invariants.target import Feeds, GlobalBatch, Target, Window


def window_of(target: Target, case: Case, step: int) -> Window:
    """The window of optimizer step `step`, counted from 0: the target's own, else random tokens."""
    if isinstance(target, Feeds):
        given = target.window(case, step)
        window = list(given) if isinstance(given, Iterable) else []
        if not window or not all(isinstance(batch, GlobalBatch) for batch in window):
            found = ", ".join(sorted({type(batch).__name__ for batch in window})) or "no batch"
            raise UsageError(f"window of step {step}: {found}: expected one GlobalBatch or more")
        return window
    return [_batch(case, step, index) for index in range(case.windows[step])]


def in_precision(window: Window, dtype: torch.dtype) -> Window:
    """The same window; inputs and targets that are no integers in `dtype`."""

    def cast(values: torch.Tensor) -> torch.Tensor:
        return values.to(dtype) if values.is_floating_point() else values

    return [GlobalBatch(cast(batch.tokens), cast(batch.targets), batch.mask) for batch in window]


def _batch(case: Case, step: int, index: int) -> GlobalBatch:
    generator = torch.Generator().manual_seed((case.seed << 24) + (step << 12) + index)
    shape = (case.batch_size, case.model.sequence)
    tokens, targets = torch.randint(case.model.vocabulary, (2, *shape), generator=generator)
    return GlobalBatch(tokens, targets, _mask(case.mask, shape, generator))


def _mask(kind: Mask, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """1 where a token counts; each sample keeps 1 token or more, or, with holes, may be left out."""
    samples, length = shape
    if kind == "full":
        return torch.ones(shape)
    kept = torch.randint(1, length + 1, (samples, 1), generator=generator)
    order = torch.rand(shape, generator=generator).argsort(dim=1).argsort(dim=1)
    mask = (order < kept).float()
    if kind == "holes":
        mask *= (torch.rand((samples, 1), generator=generator) < 0.5).float()
    return mask
