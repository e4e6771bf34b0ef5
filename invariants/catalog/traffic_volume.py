"""traffic.volume: a step communicates as many bytes as the target promises.

What is judged is payload, see `payload.py`, by data-parallel group and by ordered pair of ranks of a pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from invariants.case import Case
from invariants.catalog.payload import PADDED, element_bytes, payload
from invariants.catalog.places import ranks_in_words
from invariants.catalog.recorded import demand, ranks_and_steps
from invariants.catalog.sizes import Line, Sizes, Stage
from invariants.communication import POINT_TO_POINT, Operation
from invariants.evidence import Evidence, Section
from invariants.invariant import NotApplicable, Violation, invariant


def _along_pp_and_dp(case: Case) -> str | None:
    if case.topology.world_size == 1:
        return "one rank sends nothing"
    other = [name for name, size in case.topology.axes if name not in ("pp", "dp") and size > 1]
    return f"nothing is promised of traffic along {', '.join(other)}" if other else None


@invariant("traffic.volume", needs=[Section.COMMUNICATION, Section.OPTIMIZER], applies=_along_pp_and_dp)
def traffic_volume(evidence: Evidence) -> Iterator[Violation]:
    """The payload of each step is the promised one: each of a stage's D replicas sends (D-1)/D (G + P) bytes where a
    reduce-scatter sums G bytes of gradients and P bytes of parameters are gathered, (D-1)/D (2 G + P) where an
    all-reduce sums them; each microbatch's activation crosses a stage boundary once, and its gradient comes back once.
    """
    if evidence.promises.traffic is None:
        raise NotApplicable("the target promises nothing of its traffic (`Promises.traffic`)")
    sizes = Sizes.of(evidence)
    for resumed, step, operations in _steps(evidence):
        counted = [each for each in operations if payload(each) and not sizes.sets_apart(each)]
        batches = evidence.case.windows[step - 1]
        found = [violation for stage in sizes.stages for violation in _replicas(evidence, stage, batches, counted)]
        found += [violation for line in sizes.lines for violation in _boundaries(evidence, line, batches, counted)]
        found += _elsewhere(sizes, counted)
        what = "after the load, " if resumed else ""
        yield from (replace(violation, what=what + violation.what, step=step) for violation in found)


def _steps(evidence: Evidence) -> Iterator[tuple[bool, int, list[Operation]]]:
    """Whether after a load, step, and the operations of all ranks inside it."""
    steps: dict[tuple[bool, int], list[Operation]] = defaultdict(list)
    recorded = set()
    for posted in evidence.communication or ():
        if posted.inside:
            steps[posted.resumed, posted.step] += posted.operations
            recorded.add((posted.resumed, posted.rank, posted.step))
    case = evidence.case
    for resumed in {False, *(resumed for resumed, _ in steps)}:
        first = 1 + (case.save_after or 0) if resumed else 1
        wanted = ranks_and_steps(case.topology.world_size, first, len(case.windows))
        demand("after a load, rank, step:", ((resumed, *each) for each in wanted), recorded)
    for (resumed, step), operations in sorted(steps.items(), key=lambda each: each[0]):
        yield resumed, step, operations


def _replicas(evidence: Evidence, stage: Stage, batches: int, counted: Sequence[Operation]) -> Iterator[Violation]:
    """What the replicas of `stage` send each other, in the mean over them."""
    promised, replicas = evidence.promises.traffic, len(stage.ranks)
    assert promised is not None
    if replicas == 1:
        return
    own = [each for each in counted if _ends(each) <= set(stage.ranks)]
    sums = (1 if promised.gradients == "reduce-scatter" else 2) * (batches if promised.summed == "batch" else 1)
    fetched = int(promised.parameters == "gathered")
    share = Fraction(replicas - 1, replicas)
    expected = share * stage.bytes * (sums + fetched)
    # A buffer of equal shares is padded by less than one unit of them; its payload is there once for each replica.
    unit = replicas * evidence.promises.alignment
    padding = sum(share * (unit - 1) * element_bytes(each) for each in own if each.kind.startswith(PADDED))
    observed = sum(map(payload, own), Fraction(0)) / replicas
    if not expected <= observed <= expected + Fraction(padding) / replicas:
        formula = f"({replicas}-1)/{replicas} x {stage.bytes} bytes x ({sums} for gradients + {fetched} for parameters)"
        yield _violation(
            f"bytes that each of {ranks_in_words(stage.ranks)} sends the others",
            expected,
            f"{_number(expected)} = {formula}",
            observed,
            _by_kind(own, replicas),
            stage.index,
        )


def _boundaries(evidence: Evidence, line: Line, batches: int, counted: Sequence[Operation]) -> Iterator[Violation]:
    """What each rank of a pipeline sends each other one."""
    case = evidence.case
    messages = batches * case.microbatches
    sent: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for each in counted:
        ends = _ends(each)
        if ends <= set(line.ranks) and len(ends) == 2:
            sent[each.rank, next(iter(ends - {each.rank}))].append(each)
    for source, target in sorted({*sent, *line.pairs}):
        crossings, needless, tied = line.pairs.get((source, target), (0, 0, 0))
        observed = sum(map(payload, sent[source, target]), Fraction(0))
        allowed = [messages * line.activation * (crossings - less) + tied for less in (0, needless)]
        if observed not in allowed:
            formula = f"{messages} microbatches x {crossings} x {line.activation} bytes"
            formula += f" + {tied} of a gradient that both hold" if tied else ""
            what = f"bytes from rank {source} to rank {target}"
            expected = f"{allowed[0]} = {formula}"
            yield _violation(what, Fraction(allowed[0]), expected, observed, _by_kind(sent[source, target], 1), None)


def _elsewhere(sizes: Sizes, counted: Sequence[Operation]) -> Iterator[Violation]:
    """What belongs to no stage and to no pair of a pipeline."""
    replicas = [set(stage.ranks) for stage in sizes.stages]
    lines = [set(line.ranks) for line in sizes.lines]

    def belongs(ends: frozenset[int]) -> bool:
        return any(ends <= ranks for ranks in replicas) or (len(ends) == 2 and any(ends <= ranks for ranks in lines))

    strays = [each for each in counted if not belongs(_ends(each))]
    if strays:
        observed = sum(map(payload, strays), Fraction(0))
        first = f"{_number(observed)} bytes, the first in {strays[0]}"
        yield Violation("traffic between stages and replicas both", "none", first, rank=strays[0].rank)


def _ends(operation: Operation) -> frozenset[int]:
    both = operation.kind in POINT_TO_POINT
    return frozenset((operation.rank, operation.peer) if both else operation.members)


def _by_kind(operations: Iterable[Operation], ranks: int) -> str:
    sums: dict[str, Fraction] = defaultdict(Fraction)
    for each in operations:
        sums[each.kind] += payload(each) / ranks
    return " + ".join(f"{kind} {_number(size)}" for kind, size in sums.items())


def _violation(
    what: str, wanted: Fraction, expected: str, observed: Fraction, kinds: str, stage: int | None
) -> Violation:
    excess = float(abs(observed - wanted) / wanted) if wanted else float("inf")
    seen = f"{_number(observed)} = {kinds}" if kinds else "none"
    return Violation(what, expected, seen, stage=stage, excess=excess)


def _number(value: Fraction) -> str:
    return f"{float(value):.12g}"
