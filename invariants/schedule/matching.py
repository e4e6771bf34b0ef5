"""Which send meets which receive: messages of a channel are first in, first out.

A channel is an ordered pair of ranks, and a communicator where a transport has several: a rank posts in program order,
and the k-th send of a channel meets its k-th receive, whatever they are called.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from invariants.schedule.compiled import available, loop
from invariants.schedule.engine import NOBODY, NOTHING
from invariants.schedule.table import RECV_B, RECV_F, SEND_B, SEND_F, Schedule


def peer_ranks(schedule: Schedule) -> NDArray[np.int32]:
    """Rank at the other end of each send and receive [A]; -1 where no rank computes that stage, or nothing is sent."""
    homes = np.append(schedule.placement, np.int32(-1))
    up = (schedule.op == SEND_F) | (schedule.op == RECV_B)
    stage = np.where(up, schedule.stage + 1, schedule.stage - 1)
    stage[(stage < 0) | (stage >= schedule.stages) | ~schedule.exchanges] = -1
    return homes[stage]


def peer_rank(schedule: Schedule, index: int) -> int:
    """`peer_ranks` of one action."""
    stage = schedule.action(index).peer
    return int(schedule.placement[stage]) if 0 <= stage < schedule.stages else -1


def match(schedule: Schedule, channel: NDArray[np.uint8] | None = None) -> NDArray[np.int32]:
    """Index of the action at the other end of each send and receive [A]: `NOBODY` where there is none, `NOTHING` for an
    action that does neither.

    `channel` [A] tells communicators apart: 0 or 1 for each action; None where there is one only.
    """
    channels = np.zeros(0, np.uint8) if channel is None else channel
    if available():
        partner = np.empty(len(schedule), np.int32)  # from numpy, which asks the system for large pages
        _match_loop(schedule.starts, schedule.op, schedule.stage, schedule.placement, channels, partner)
        return partner
    return _match_arrays(schedule, channels)


def _match_arrays(schedule: Schedule, channel: NDArray[np.uint8]) -> NDArray[np.int32]:
    peer = peer_ranks(schedule)
    partner = np.where(schedule.exchanges, np.int32(NOBODY), np.int32(NOTHING))
    sends = np.flatnonzero(((schedule.op == SEND_F) | (schedule.op == SEND_B)) & (peer >= 0))
    receives = np.flatnonzero(((schedule.op == RECV_F) | (schedule.op == RECV_B)) & (peer >= 0))
    ranks, rank = schedule.ranks, schedule.rank.astype(np.int64)
    lines = np.zeros(len(schedule), np.uint8) if len(channel) == 0 else channel
    # A message is its channel and its turn there; who has the same are partners.
    send_keys = (rank[sends] * ranks + peer[sends]) * 2 + lines[sends]
    receive_keys = (peer[receives].astype(np.int64) * ranks + rank[receives]) * 2 + lines[receives]
    owners = np.unique(np.concatenate([send_keys, receive_keys]), return_inverse=True)[1]
    send_turns, receive_turns = _turns(owners[: len(sends)]), _turns(owners[len(sends) :])
    names = owners * (len(schedule) + 1)
    _, left, right = np.intersect1d(
        names[: len(sends)] + send_turns, names[len(sends) :] + receive_turns, assume_unique=True, return_indices=True
    )
    partner[sends[left]] = receives[right]
    partner[receives[right]] = sends[left]
    return partner


def _turns(owners: NDArray[Any]) -> NDArray[np.int64]:
    """For each element, how many equal ones come before it."""
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    new = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.int64)
    turns = np.empty(len(owners), np.int64)
    turns[order] = np.arange(len(owners)) - np.repeat(new, np.diff(np.r_[new, len(owners)]))
    return turns


@loop
def _match_loop(
    starts: NDArray[np.int64],
    op: NDArray[np.uint8],
    stage: NDArray[np.int32],
    placement: NDArray[np.int32],
    channel: NDArray[np.uint8],
    partner: NDArray[np.int32],
) -> None:
    ranks, stages = len(starts) - 1, len(placement)
    for i in range(len(op)):
        partner[i] = NOBODY if SEND_F <= op[i] <= RECV_B else NOTHING
    # How far each sender's row has been searched for messages to the rank at hand. A row is read once for each rank
    # that it sends to: in a pipeline, neighbours.
    searched = np.empty(2 * ranks, np.int64)
    for rank in range(ranks):
        searched[:] = -1
        for i in range(starts[rank], starts[rank + 1]):
            if op[i] != RECV_F and op[i] != RECV_B:
                continue
            maker = stage[i] + (1 if op[i] == RECV_B else -1)
            if maker < 0 or maker >= stages or placement[maker] < 0:
                continue
            source = placement[maker]
            line = channel[i] if len(channel) else 0
            at = max(searched[2 * source + line], starts[source])
            while at < starts[source + 1]:
                if (op[at] == SEND_F or op[at] == SEND_B) and (len(channel) == 0 or channel[at] == line):
                    to = stage[at] + (1 if op[at] == SEND_F else -1)
                    if 0 <= to < stages and placement[to] == rank:
                        partner[i], partner[at] = at, i
                        at += 1
                        break
                at += 1
            searched[2 * source + line] = at
