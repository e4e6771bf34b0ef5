"""p2p.portable: what ranks post, in the order in which they post it, ends on NCCL too.

gloo goes on after each post, so a run on it shows nothing of what NCCL's streams make of the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from invariants.catalog.communicated import Run, runs, several_ranks
from invariants.catalog.replay import Replay, replay
from invariants.communication import ANY_SOURCE
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant

TRANSPORTS = {"nccl-lazy": True, "nccl-eager": False}
"""Whether messages that are posted one by one have a communicator for each pair of ranks."""


@invariant("p2p.portable", needs=[Section.COMMUNICATION], applies=several_ranks)
def p2p_portable(evidence: Evidence) -> Iterator[Violation]:
    """The operations of a run, posted in the recorded order, end on NCCL, with communicators that are made lazily or
    eagerly; each receive gets the message of its own tag, though NCCL knows no tags.
    """
    for run in runs(evidence):
        operations = [operation for posted in run.records.values() for operation in posted]
        for each in operations:
            if each.kind == ANY_SOURCE:
                yield run.violation(str(each), "a named sender: NCCL knows no other", "any", each, each.rank)
        named = [each for each in operations if each.kind != ANY_SOURCE]
        outcomes = {transport: replay(named, pairs=pairs) for transport, pairs in TRANSPORTS.items()}
        yield from _stuck(run, outcomes)
        yield from _swapped(run, outcomes)


def _stuck(run: Run, outcomes: Mapping[str, Replay]) -> Iterator[Violation]:
    """Once for what is stuck in the same way on both."""
    told: dict[str, list[str]] = defaultdict(list)
    for transport, outcome in outcomes.items():
        told[str(outcome)].append(transport)
    for said, transports in told.items():
        if (first := outcomes[transports[0]].stuck) is not None:
            what = f"on {' and '.join(transports)}"
            yield run.violation(what, "all operations get through", said, first, first.rank)


def _swapped(run: Run, outcomes: Mapping[str, Replay]) -> Iterator[Violation]:
    for transport, outcome in outcomes.items():
        for send, receive in outcome.swapped[:1]:
            more = f" (and {len(outcome.swapped) - 1} more)" if len(outcome.swapped) > 1 else ""
            what, expected = f"on {transport}, {send}{more}", f"it goes to a receive with tag {send.tag}"
            yield run.violation(what, expected, f"rank {receive.rank}'s {receive}", send, send.rank)
