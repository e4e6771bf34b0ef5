"""p2p.portable: what ranks post, in the order in which they post it, ends on NCCL too.

gloo goes on after each post, so a run on it shows nothing of what NCCL's streams make of the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from invariants.catalog.recorded import something
from invariants.catalog.replay import Replay, replay
from invariants.communication import ANY_SOURCE, Operation
from invariants.evidence import Evidence, Posted, Section
from invariants.invariant import Violation, invariant

TRANSPORTS = {"nccl-lazy": True, "nccl-eager": False}
"""Whether messages that are posted one by one have a communicator for each pair of ranks."""


@invariant("p2p.portable", needs=[Section.COMMUNICATION])
def p2p_portable(evidence: Evidence) -> Iterator[Violation]:
    """The operations of a run, posted in the recorded order, end on NCCL, with communicators that are made lazily or
    eagerly; each receive gets the message of its own tag, though NCCL knows no tags.
    """
    recorded = something("communication", evidence.communication)
    for resumed in sorted({posted.resumed for posted in recorded}):
        run = [posted for posted in recorded if posted.resumed is resumed]
        yield from _unknown_senders(run)
        operations = [each for posted in run for each in posted.operations if each.kind != ANY_SOURCE]
        outcomes = {transport: replay(operations, pairs=pairs) for transport, pairs in TRANSPORTS.items()}
        yield from _stuck(run, outcomes)
        yield from _swapped(run, outcomes)


def _stuck(run: Sequence[Posted], outcomes: Mapping[str, Replay]) -> Iterator[Violation]:
    """Once for what is stuck in the same way on both."""
    told: dict[str, list[str]] = defaultdict(list)
    for transport, outcome in outcomes.items():
        told[str(outcome)].append(transport)
    for said, transports in told.items():
        if (first := outcomes[transports[0]].stuck) is not None:
            what = f"on {' and '.join(transports)}"
            yield Violation(what, "all operations get through", said, rank=first.rank, step=_step(run, first))


def _swapped(run: Sequence[Posted], outcomes: Mapping[str, Replay]) -> Iterator[Violation]:
    for transport, outcome in outcomes.items():
        for send, receive in outcome.swapped[:1]:
            more = f" (and {len(outcome.swapped) - 1} more)" if len(outcome.swapped) > 1 else ""
            observed = f"rank {receive.rank}'s {receive}"
            expected = f"it goes to a receive with tag {send.tag}"
            yield Violation(f"on {transport}, {send}{more}", expected, observed, rank=send.rank, step=_step(run, send))


def _unknown_senders(run: Sequence[Posted]) -> Iterator[Violation]:
    for posted in run:
        for operation in posted.operations:
            if operation.kind == ANY_SOURCE:
                yield Violation(str(operation), "a named sender: NCCL knows no other", "any", posted.rank, posted.step)


def _step(run: Sequence[Posted], operation: Operation) -> int | None:
    """The step inside which it was posted."""
    return next((each.step for each in run if each.inside and operation in each.operations), None)
