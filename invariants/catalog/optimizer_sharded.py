"""optimizer.sharded: optimizer state takes the memory that its layout promises, and nothing is lost or held twice.

It counts the tensors that the target says it holds, not a library's own buffers or what an allocator rounds up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

from invariants.catalog.places import ranks_in_words, span
from invariants.catalog.sharding import Segment, Stage, elements, misplaced, stages
from invariants.evidence import Evidence, Owned, Section
from invariants.invariant import NotApplicable, Violation, invariant

MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}
"""Tensors of state for each parameter where the target promises no number; momentum of SGD is 0."""
BYTES = {"float32": 4, "float64": 8}
MASTER_BYTES = 4


@invariant("optimizer.sharded", needs=[Section.OPTIMIZER])
def optimizer_sharded(evidence: Evidence) -> Iterator[Violation]:
    """Bytes of optimizer state on each rank are those of the promised layout, per stage and over trained parameters:
    8 (Adam in float32) x sum over groups of ceil(P_g/D) for flat shards; shards are disjoint and cover.

    Padding counts, step counters and parameters that never get a gradient and have no state do not.
    Source: ZeRO, arXiv:1910.02054, section 5.1 (P_os).
    """
    case, promises = evidence.case, evidence.promises
    moments = MOMENTS[case.optimizer.kind] if promises.state_tensors is None else promises.state_tensors
    tensors = moments + promises.masters
    element = moments * BYTES[case.precision] + promises.masters * MASTER_BYTES
    found = tuple(stages(evidence))
    stateless = not any(stage.state for stage in found)
    if not any(stage.trained for stage in found):
        if stateless and any(stage.idle for stage in found):
            raise NotApplicable("no parameter has a gradient in any step, and none has state")
        raise LookupError("no trained parameter was recorded")
    if not tensors and stateless:
        raise NotApplicable(f"no state is promised: 0 tensors for each parameter with {case.optimizer.kind}")
    for stage in found:
        if stage.trained and len(stage.keys) != tensors:
            observed = f"{len(stage.keys)}: {', '.join(stage.keys) or 'none'}"
            yield Violation("tensors of state for each parameter", str(tensors), observed, stage=stage.index)
        yield from _places(stage, promises.layout)
        yield from _sizes(stage, _promised(stage, evidence), element)
        if promises.layout == "whole-parameter":
            yield from _bounded(stage, element)


def _places(stage: Stage, layout: str) -> Iterator[Violation]:
    """What lies where it should not, or not where it should; replicas are looked at one by one."""
    scopes = [(rank,) for rank in stage.ranks] if layout == "replicated" else [stage.ranks]
    for ranks in scopes:
        trained = [piece for piece in stage.trained if piece.rank in ranks]
        state = [piece for piece in stage.state if piece.rank in ranks]
        wrong = list(misplaced(trained, state, stage.keys))
        yield from (_misplaced(segment, stage.index, ranks) for segment in wrong)
        if layout == "whole-parameter" and not wrong:
            yield from _split(stage)


def _misplaced(segment: Segment, stage: int, ranks: Sequence[int]) -> Violation:
    once = f"held by {'one of ' if len(ranks) > 1 else ''}{ranks_in_words(ranks)}"
    expected = once if segment.trained else "no state, for it is not trained there"
    observed = f"held by {ranks_in_words(segment.holders)}" if segment.holders else "held by none"
    rank = segment.holders[-1] if segment.holders else None
    what = f"{segment.key}, {span(segment.lo, segment.hi)}"
    return Violation(what, expected, observed, rank=rank, stage=stage, tensor=segment.name)


def _split(stage: Stage) -> Iterator[Violation]:
    holders: dict[str, set[int]] = defaultdict(set)
    for piece in stage.state:
        if piece.lo < piece.hi:
            holders[piece.name].add(piece.rank)
    for name, ranks in holders.items():
        if len(ranks) > 1:
            observed = f"on {ranks_in_words(sorted(ranks))}"
            yield Violation("state of one parameter", "whole on one rank", observed, stage=stage.index, tensor=name)


def _promised(stage: Stage, evidence: Evidence) -> list[tuple[int, str]]:
    """Elements of each state tensor that each rank is to hold, padding included, and how they are counted."""
    layout, alignment, replicas = evidence.promises.layout, evidence.promises.alignment, len(stage.ranks)
    if layout == "replicated":
        everything = sum(elements(stage.trained).values())
        return [(everything, f"{everything} trained elements")] * replicas
    if layout == "whole-parameter":
        owned = [sum(elements(p for p in stage.state if p.rank == rank).values()) for rank in stage.ranks]
        return [(count, f"{count} elements of whole parameters") for count in owned]
    groups: dict[int, list[Owned]] = defaultdict(list)
    for piece in stage.state:
        groups[piece.group].append(piece)
    sizes = [sum(elements(groups[group]).values()) for group in sorted(groups)]
    shard = sum(alignment * -(-size // (replicas * alignment)) for size in sizes)
    times, unit = (f"{alignment} " if alignment > 1 else ""), replicas * alignment
    return [(shard, " + ".join(f"{times}ceil({size}/{unit})" for size in sizes) or "0 elements")] * replicas


def _sizes(stage: Stage, promised: Sequence[tuple[int, str]], element: int) -> Iterator[Violation]:
    for rank, size, (count, formula) in zip(stage.ranks, stage.sizes, promised, strict=True):
        expected = element * count
        if size != expected:
            yield Violation(
                "bytes of optimizer state",
                f"{expected} = {element} x ({formula})",
                str(size),
                rank=rank,
                stage=stage.index,
                excess=abs(size - expected) / expected if expected else float("inf"),
            )


def _bounded(stage: Stage, element: int) -> Iterator[Violation]:
    """At most P/D + the largest parameter: what assigning each parameter to the emptiest rank gives in any order."""
    sizes = elements(stage.trained).values()
    everything, largest, replicas = sum(sizes), max(sizes, default=0), len(stage.ranks)
    limit = element * (Fraction(everything, replicas) + largest)
    for rank, size in zip(stage.ranks, stage.sizes, strict=True):
        if size > limit:
            expected = f"at most {float(limit):g} = {element} x ({everything}/{replicas} + {largest})"
            what, excess = "bytes of optimizer state", float(size / limit) if limit else float("inf")
            yield Violation(what, expected, str(size), rank=rank, stage=stage.index, excess=excess)
