"""How many bytes an operation takes from one rank to others, whatever the algorithm; by its kind.

Counted as a bandwidth-optimal algorithm sends them, in the mean over the members where a root sends more than others.
Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), for
2 (n-1)/n of an all-reduce; Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005), for the others; doc/PERFORMANCE.md of nccl-tests has the same factors, but for a root.
"""

from __future__ import annotations

import re
from fractions import Fraction

from invariants.communication import POINT_TO_POINT, ROOTED, SEND, Operation

PADDED = ("all_gather", "reduce_scatter", "all_to_all")
"""Beginnings of the kinds that hand out equal shares, and so may carry padding."""
_SILENT = ("barrier", "monitored_barrier", "new_group")


def payload(operation: Operation) -> Fraction:
    """Bytes that `operation` takes from its rank to others; with n members and N bytes that a rank hands in:

    all-reduce 2 (n-1)/n N, reduce-scatter (n-1)/n N, all-gather (n-1) N, all-to-all what is for others, broadcast,
    reduce, gather and scatter (n-1)/n N in the mean, a send N; a receive nothing, for its send counts. Raises
    `LookupError` for a kind that is not known.
    """
    kind, members, size = operation.kind, len(operation.members), operation.bytes
    if kind in POINT_TO_POINT:
        return Fraction(size if kind == SEND else 0)
    if kind in _SILENT:
        return Fraction(0)
    if kind.startswith("all_to_all"):
        sent = operation.splits[0]
        own = sent[operation.members.index(operation.rank)]
        return Fraction(size * (sum(sent) - own), max(1, sum(sent)))
    if kind.startswith("all_reduce"):
        return Fraction(2 * (members - 1) * size, members)
    if kind.startswith("all_gather"):
        return Fraction((members - 1) * size)
    if kind.startswith("reduce_scatter") or kind in ROOTED:
        return Fraction((members - 1) * size, members)
    raise LookupError(f"{operation}: no formula for the payload of {kind}")


def element_bytes(operation: Operation) -> int:
    """Bytes of one element: 4 for float32."""
    bits = re.search(r"\d+", operation.dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def elements(operation: Operation) -> int:
    """Elements of the whole: of what all members together hand to an all-gather, of what one hands to another kind."""
    own = operation.bytes // element_bytes(operation)
    return own * len(operation.members) if operation.kind.startswith("all_gather") else own


def floating(operation: Operation) -> bool:
    """Whether it carries numbers that may be activations, gradients or parameters."""
    return operation.dtype.startswith(("float", "bfloat", "complex"))
