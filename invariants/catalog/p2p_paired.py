"""p2p.paired: each message is received, as what it was sent.

gloo fills a receive buffer that is too large in part, and float32 goes into int32, both without an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from invariants.catalog.communicated import of_messages, several_ranks
from invariants.contract import unpaired
from invariants.evidence import Evidence, Section
from invariants.invariant import Violation, invariant


@invariant("p2p.paired", needs=[Section.COMMUNICATION], applies=several_ranks)
def p2p_paired(evidence: Evidence) -> Iterator[Violation]:
    """The k-th message that a rank sends to another one, by group and tag, is the k-th that is received there from it:
    of the same dtype, shape and bytes. No message and no receive is left over.

    Where a rank receives from any source, its messages and its receives are compared as a whole.
    """
    for run in of_messages(evidence):
        yield from map(run.mismatched, unpaired(run.records))
