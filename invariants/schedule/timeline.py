"""When each computation runs, and how long each rank is idle: exact, at zero latency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter

from invariants.errors import InvariantsError, UsageError
from invariants.schedule.actions import Action, Op, Row, actions_of
from invariants.schedule.table import Schedule, as_schedule


class NeverEnds(InvariantsError):
    """A schedule in which some computation waits for a result that never comes."""


@dataclass(frozen=True)
class Span:
    """One computation in time."""

    action: Action
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Timeline:
    """One run of a schedule, from time 0; times have the unit of the costs, and ranks are in order."""

    makespan: Fraction
    spans: tuple[tuple[Span, ...], ...]

    @property
    def busy(self) -> tuple[Fraction, ...]:
        """Time for which each rank computes."""
        return tuple(sum((span.end - span.start for span in spans), Fraction()) for spans in self.spans)

    @property
    def idle_share(self) -> tuple[Fraction, ...]:
        """Share of the *makespan* for which each rank does not compute; 0 where the makespan is 0."""
        return tuple(1 - busy / self.makespan if self.makespan else Fraction() for busy in self.busy)


def simulate(schedule: Schedule | Sequence[Row], forward: Sequence[Fraction], backward: Sequence[Fraction]) -> Timeline:
    """Run each rank's computations in order, each as soon as the results that it needs exist.

    `forward` and `backward` are the times of one microbatch on each stage, B being the full backward. Sends and
    receives cost nothing and order nothing: data decides. The forward of a stage needs that of the stage before, the
    backward that of the stage after and its own forward.

    Raises `NeverEnds` where a result never comes, and `UsageError` for costs that are negative or do not cover the
    stages, and for split backwards (I, W), which these costs do not price.
    """
    costs = {Op.FORWARD: tuple(map(Fraction, forward)), Op.BACKWARD: tuple(map(Fraction, backward))}
    rows = as_schedule(schedule).rows()
    programs = [[action for cell in row for action in actions_of(cell) if action.op.computes] for row in rows]
    stages = 1 + max((action.stage for program in programs for action in program), default=-1)
    _check(programs, costs, stages)
    spans: list[list[Span]] = [[] for _ in programs]
    end: dict[Action, Fraction] = {}
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        done = spans[rank]
        while len(done) < len(programs[rank]):
            action = programs[rank][len(done)]
            missing = next((need for need in _needs(action, stages) if need not in end), None)
            if missing:
                waiting[missing].append(rank)
                break
            start = max([done[-1].end if done else Fraction(), *(end[need] for need in _needs(action, stages))])
            done.append(Span(action, start, start + costs[action.op][action.stage]))
            end.setdefault(action, done[-1].end)
            ready += waiting.pop(action, ())
    if waiting:
        raise NeverEnds(_explain(programs, spans, waiting))
    return Timeline(max(end.values(), default=Fraction()), tuple(map(tuple, spans)))


def _needs(action: Action, stages: int) -> Iterator[Action]:
    if action.op is Op.BACKWARD:
        yield Action(action.stage, Op.FORWARD, action.microbatch)
        if action.stage < stages - 1:
            yield Action(action.stage + 1, Op.BACKWARD, action.microbatch)
    elif action.stage > 0:
        yield Action(action.stage - 1, Op.FORWARD, action.microbatch)


def _check(programs: Sequence[Sequence[Action]], costs: Mapping[Op, Sequence[Fraction]], stages: int) -> None:
    for op, times in costs.items():
        if len(times) != stages:
            raise UsageError(f"timeline: {len(times)} costs of {op.value} for {stages} stages: expected one a stage")
        if any(time < 0 for time in times):
            raise UsageError(f"timeline: a cost of {op.value} is {min(times)}: expected 0 or more")
    for program in programs:
        for action in program:
            if action.op not in costs:
                raise UsageError(f"timeline: {action}: a split backward has no cost; expected F and B only")


def _explain(
    programs: Sequence[Sequence[Action]], spans: Sequence[Sequence[Span]], waiting: Mapping[Action, Sequence[int]]
) -> str:
    stuck = sorted(((rank, missing) for missing, ranks in waiting.items() for rank in ranks), key=itemgetter(0))
    rank, missing = stuck[0]
    here = programs[rank][len(spans[rank])]
    others = f"; {len(stuck) - 1} more wait" if len(stuck) > 1 else ""
    return f"schedule never ends: rank {rank} waits at {here} for {missing}{others}"
