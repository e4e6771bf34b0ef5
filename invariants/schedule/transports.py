"""What a send waits for: each transport as a network of programs that wait for each other.

A transport says in what order operations start and what each needs to be done, and nothing of speed, so that
`engine.run` can decide whether a schedule ends. The host is the thread that walks through a rank's row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from invariants.errors import UsageError
from invariants.schedule.engine import NOTHING, Network
from invariants.schedule.matching import match, peer_ranks
from invariants.schedule.table import NEXT, RECV_B, RECV_F, B, F, I, Schedule, firsts

_NONE: Final = np.zeros(0, np.int32)
_EACH: Final = np.zeros(0, np.bool_)


@dataclass(frozen=True)
class Wiring:
    """A schedule on a transport.

    `partner` [A]: the action that each send and receive meets, `NOBODY` where it meets none. `posts`: whether the host
    goes on once it has posted a send or a receive, which is awaited later.
    """

    schedule: Schedule
    partner: NDArray[np.int32]
    network: Network
    posts: bool

    @cached_property
    def queue_of(self) -> NDArray[np.int64]:
        """Queue of each action [A]."""
        network = self.network
        queue = np.repeat(np.arange(len(network.queues) - 1), np.diff(network.queues))
        if not len(network.order):
            return queue
        owners = np.empty_like(queue)
        owners[network.order] = queue
        return owners


def buffered(schedule: Schedule, room: int | None = None) -> Wiring:
    """A send is done at once, as long as fewer than `room` messages of its channel are on their way; None: always.

    The host waits for each operation in its turn. Code that ends with buffers only is not portable (MPI 4.1, section
    3.5). With room for 0 messages it is `blocking`.
    """
    partner = match(schedule)
    receives = (schedule.op == RECV_F) | (schedule.op == RECV_B)
    beside = np.where(receives, partner, np.int32(NOTHING))
    if room is not None:
        sends = np.flatnonzero(schedule.exchanges & ~receives)
        channels = schedule.rank[sends].astype(np.int64) * (schedule.ranks + 1) + peer_ranks(schedule)[sends]
        order = np.argsort(channels, kind="stable")
        sends, channels = sends[order], channels[order]
        late = np.arange(room, len(sends))
        late = late[channels[late] == channels[late - room]]
        beside[sends[late]] = partner[sends[late - room]]
    return Wiring(schedule, partner, Network(schedule.starts, _NONE, _opens(schedule), _NONE, beside), False)


def blocking(schedule: Schedule) -> Wiring:
    """A send is done when its receive has been posted (rendezvous), and the host waits for each operation in its turn.

    It is what MPI calls the synchronous mode (MPI 4.1, section 3.4), and what gloo's `send` does, for four floats too.
    """
    partner = match(schedule)
    return Wiring(schedule, partner, Network(schedule.starts, _NONE, _opens(schedule), _NONE, partner), False)


def gloo(schedule: Schedule) -> Wiring:
    """The host posts and goes on; a computation waits until the message that its receive gets has been sent.

    What `isend` and `irecv` of torch's gloo backend do: one first-in-first-out queue for each ordered pair of ranks and
    tag (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), sizes not compared. So a receive that is posted out of send
    order gets another message, silently, where both have one size. Each operation is awaited before the step ends.
    """
    partner = match(schedule)
    receive = _receives(schedule)
    here = np.arange(len(schedule), dtype=np.int32)
    posted = (receive >= 0) & (receive < here)
    before = np.where(posted, partner[receive], receive)
    return Wiring(schedule, partner, Network(schedule.starts, _NONE, _opens(schedule), before, _NONE), True)


def nccl_lazy(schedule: Schedule) -> Wiring:
    """NCCL without `device_id` at `init_process_group`: a communicator and a stream for each *unordered* pair of ranks.

    The host posts and goes on. An operation starts when those before it on its stream are done, and the last
    computation that was posted before it; it is done when its partner has started, since a kernel of NCCL holds its
    stream until its peer takes part (NCCL's buffers are not relied on). Sends and receives that are posted one by one
    share the pair's stream, both directions; a batch goes to the group's stream, and starts and ends as a whole.
    What is posted in a batch and what is posted alone never meet: their communicators differ. A computation starts
    after the receive of its data. Not modelled: the host does wait while a communicator is made, at the first single
    operation of a pair for that peer, at the first batch for the whole group.

    Sources: `ProcessGroupNCCL::pointToPoint`, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`getKeySendRecv` for
    single operations, the device's key for batches); pytorch PR 74701 (batches use the group's communicator);
    NVIDIA/nccl#479 (two single sends that face each other hang); pytorch#172668 (pipeline schedules that hang so).
    torch 2.13 posts lists of sends alone, or of receives alone, one by one (pytorch PR 175712): a `BATCH` cell here
    means one that is posted as a batch.
    """
    return _streams(schedule, pairs=True, communicators=True)


def nccl_eager(schedule: Schedule) -> Wiring:
    """NCCL with `device_id` given: one communicator and one stream for the group, single operations and batches alike.

    Otherwise as `nccl_lazy`. Source: pytorch PR 154132, which warns that single operations are serialized then.
    """
    return _streams(schedule, pairs=False, communicators=False)


def nccl_one_stream(schedule: Schedule) -> Wiring:
    """The communicators of `nccl_lazy`, but all operations of a rank on one stream: conservative.

    No backend does so by itself. It is how things stand where launches are serialized (`CUDA_DEVICE_MAX_CONNECTIONS=1`,
    as tensor-parallel training sets it): what ends here does not depend on streams that run side by side.
    """
    return _streams(schedule, pairs=False, communicators=True)


TRANSPORTS: Final[Mapping[str, Callable[[Schedule], Wiring]]] = {
    "buffered": buffered,
    "blocking": blocking,
    "gloo": gloo,
    "nccl-lazy": nccl_lazy,
    "nccl-eager": nccl_eager,
    "nccl-one-stream": nccl_one_stream,
}
"""Each transport by its name; `buffered(k)` is `buffered` with room for k messages."""

_ROOM = re.compile(r"buffered\((\d{1,9})\)")


def wire(schedule: Schedule, transport: str) -> Wiring:
    """The schedule on the transport of that name; one that does not exist is a `UsageError`."""
    if room := _ROOM.fullmatch(transport):
        return buffered(schedule, int(room[1]))
    if transport not in TRANSPORTS:
        raise UsageError(f"transport {transport!r}: expected one of {', '.join(TRANSPORTS)}, buffered(k)")
    return TRANSPORTS[transport](schedule)


def _opens(schedule: Schedule) -> NDArray[np.bool_]:
    return schedule.joint != NEXT if schedule.joint.any() else _EACH


def _streams(schedule: Schedule, *, pairs: bool, communicators: bool) -> Wiring:
    """Queues of a rank: its computations, and its communications on one stream or, `pairs`, one for each peer."""
    exchanges, rank = schedule.exchanges, schedule.rank.astype(np.int64)
    batched = exchanges & (schedule.joint > 0)
    partner = match(schedule, batched.astype(np.uint8) if communicators else None)
    stream = exchanges.astype(np.int64)
    if pairs:
        alone = exchanges & ~batched
        stream[alone] = 3 + peer_ranks(schedule)[alone]
    keys = rank * (schedule.ranks + 3) + stream
    order = np.argsort(keys, kind="stable").astype(np.int32)
    ordered = keys[order]
    queues = np.r_[np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]), len(ordered)]
    before = _receives(schedule)
    # The stream of communication waits for what the stream of computation has been given by then.
    here = np.arange(len(schedule), dtype=np.int32)
    computed = np.maximum.accumulate(np.where(schedule.computes, here, np.int32(NOTHING)))
    before[exchanges] = np.where(computed >= schedule.starts[rank], computed, np.int32(NOTHING))[exchanges]
    opens = schedule.joint[order] != NEXT
    return Wiring(schedule, partner, Network(queues, order, opens, before, partner), True)


def _receives(schedule: Schedule) -> NDArray[np.int32]:
    """Receive on the same rank that gets each computation its data [A]; `NOTHING` where there is none."""
    found = np.full(len(schedule), NOTHING, np.int32)
    for receive, users in ((RECV_F, (F,)), (RECV_B, (B, I))):
        received = np.flatnonzero((schedule.op == receive) & (schedule.stage >= 0) & (schedule.microbatch >= 0))
        places = schedule.stage[received], schedule.microbatch[received]
        table = firsts((schedule.stages, schedule.microbatches), places, received)
        using = np.isin(schedule.op, users) & (schedule.stage >= 0) & (schedule.microbatch >= 0)
        found[using] = table[schedule.stage[using], schedule.microbatch[using]]
    astray = (found >= 0) & (schedule.rank[found] != schedule.rank)
    found[astray] = NOTHING
    return found
