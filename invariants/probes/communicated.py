"""What the recorder of a rank has noted of one run, cut into steps."""

from __future__ import annotations

from dataclasses import replace

from invariants.communication import Operation
from invariants.evidence import Posted
from invariants.world.recorder import Recorder


class Communicated:
    """Cuts what `recorder` notes from now on; it also watches the buffers of messages from now on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._marks: list[tuple[int, int, bool]] = []
        recorder.watch_buffers()
        self.goes_on(0)

    def goes_on(self, step: int, *, inside: bool = False) -> None:
        """What follows is posted inside step `step`, or else after `step` steps and in none."""
        self._marks.append((self._recorder.posted, step, inside))

    def posted(self, rank: int, *, resumed: bool) -> tuple[Posted, ...] | None:
        """All that was noted so far; None where it was more than the record holds."""
        first, total = self._marks[0][0], self._recorder.posted
        operations = _ticking(self._recorder.operations(first))
        if not self._recorder.complete:
            return None
        cut: dict[tuple[int, bool], tuple[Operation, ...]] = {}
        ends = [*(number for number, _, _ in self._marks[1:]), total]
        for (begin, step, inside), end in zip(self._marks, ends, strict=True):
            cut[step, inside] = cut.get((step, inside), ()) + operations[begin - first : end - first]
        return tuple(Posted(rank, step, inside, resumed, part) for (step, inside), part in cut.items())


def _ticking(operations: list[Operation]) -> tuple[Operation, ...]:
    """With places in the order of all times instead of seconds: small, and the same in each run."""
    times = {time for operation in operations for time in (operation.posted, operation.completed) if time}
    ticks = {time: float(tick) for tick, time in enumerate(sorted(times), 1)} | {0.0: 0.0}
    first = operations[0].number if operations else 0
    return tuple(
        replace(
            operation,
            number=operation.number - first,
            posted=ticks[operation.posted],
            completed=ticks[operation.completed],
        )
        for operation in operations
    )
