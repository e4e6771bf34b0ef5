"""What a target promises of the bytes that it communicates, as part of its `Promises`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from invariants.errors import UsageError


@dataclass(frozen=True)
class Traffic:
    """What each of the D replicas of a stage sends the others in one optimizer step, scalars and counts aside.

    `gradients`: how they are summed, whatever the operations: by `reduce-scatter` a rank gets the sums of its share,
    for (D-1)/D of their bytes; by `all-reduce` it gets all sums, for twice as much. `summed`: once a `window`, or after
    each `batch` of it. `parameters`: `gathered` from those who updated them, for (D-1)/D of their bytes, or `kept`.

    With it goes the promise of a pipeline: each microbatch's activation crosses a boundary between stages once, and its
    gradient comes back once, both [microbatch_size, sequence, width] in the case's precision; the gradient of a weight
    that two stages hold is exchanged once a step.
    """

    gradients: Literal["reduce-scatter", "all-reduce"]
    parameters: Literal["gathered", "kept"]
    summed: Literal["window", "batch"] = "window"

    def __post_init__(self) -> None:
        allowed: Mapping[str, Sequence[str]] = {
            "gradients": ("reduce-scatter", "all-reduce"),
            "parameters": ("gathered", "kept"),
            "summed": ("window", "batch"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                expected = " or ".join(map(repr, values))
                raise UsageError(f"promises: traffic: {name}={getattr(self, name)!r}: expected {expected}")
