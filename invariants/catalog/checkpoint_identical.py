"""checkpoint.identical: what is loaded is what was saved.

It sees what the target says it holds. State that it keeps elsewhere (a data loader's place, a learning rate schedule)
is not part of the evidence; checkpoint.resume sees what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from invariants.case import Case
from invariants.catalog.places import changed
from invariants.catalog.recorded import demand
from invariants.evidence import Evidence, Section, State
from invariants.invariant import Violation, invariant


def saves(case: Case) -> str | None:
    """None where the history saves."""
    return "the history saves nothing" if case.save_after is None else None


@invariant("checkpoint.identical", needs=[Section.RELOAD], applies=saves)
def checkpoint_identical(evidence: Evidence) -> Iterator[Violation]:
    """What fresh processes loaded is what was saved, on each rank and byte for byte: parameters, optimizer state,
    random generators and the number of steps done, no more than were made; nothing is missing and nothing is added.
    """
    if evidence.reload is None:
        raise LookupError("section reload was not recorded")
    saved = {state.rank: state for state in evidence.reload.saved}
    loaded = {state.rank: state for state in evidence.reload.loaded}
    ranks = range(evidence.case.topology.world_size)
    demand("saved state of rank", ranks, saved)
    demand("loaded state of rank", ranks, loaded)
    for rank in ranks:
        yield from _compare(saved[rank], loaded[rank], evidence.case.save_after)


def _compare(saved: State, loaded: State, step: int | None) -> Iterator[Violation]:
    place = partial(Violation, rank=saved.rank, step=step)
    yield from changed("loaded parameter", saved.parameters, loaded.parameters, rank=saved.rank, step=step)
    yield from changed("loaded optimizer state", saved.optimizer, loaded.optimizer, rank=saved.rank, step=step)
    before, after = dict(saved.generators), dict(loaded.generators)
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            states = (f"state {digest}" if digest else "nothing" for digest in (before.get(name), after.get(name)))
            yield place(f"loaded random generator {name}", *states)
    # Fewer may be right: a trainer that skips an update need not count it.
    if saved.steps is not None and step is not None and saved.steps > step:
        yield place("steps done, as saved", f"{step} at most", str(saved.steps))
    if saved.steps != loaded.steps:
        yield place("steps done", *(_number(state.steps) for state in (saved, loaded)))


def _number(steps: int | None) -> str:
    return "no number" if steps is None else str(steps)
