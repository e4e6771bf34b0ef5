"""p2p.portable: what ranks post, in the order in which they post it, ends on NCCL too.

gloo goes on after each post, so a run on it shows nothing of what NCCL's streams make of the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from invariants.catalog.recorded import something
from invariants.catalog.replay import replay
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
        for transport, pairs in TRANSPORTS.items():
            yield from _replayed(run, transport, pairs)


def _replayed(run: Sequence[Posted], transport: str, pairs: bool) -> Iterator[Violation]:
    operations = [operation for posted in run for operation in posted.operations]
    outcome = replay((each for each in operations if each.kind != ANY_SOURCE), pairs=pairs)
    if outcome.waits:
        first = outcome.waits[0][0]
        said = "; ".join(sentence for _, sentence in outcome.waits)
        yield Violation(transport, "termination", said, rank=first.rank, step=_step(run, first))
    for send, receive in outcome.swapped[:1]:
        observed = f"it goes to rank {receive.rank}'s {receive}"
        more = f" (and {len(outcome.swapped) - 1} more)" if len(outcome.swapped) > 1 else ""
        what = f"{transport}: {send}{more}"
        yield Violation(what, f"a receive with tag {send.tag}", observed, rank=send.rank, step=_step(run, send))


def _unknown_senders(run: Sequence[Posted]) -> Iterator[Violation]:
    for posted in run:
        for operation in posted.operations:
            if operation.kind == ANY_SOURCE:
                yield Violation(str(operation), "a named sender: NCCL knows no other", "any", posted.rank, posted.step)


def _step(run: Sequence[Posted], operation: Operation) -> int | None:
    """The step inside which it was posted."""
    return next((each.step for each in run if each.inside and operation in each.operations), None)
