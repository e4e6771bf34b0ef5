"""p2p.portable, judged on literal operations, and held against the schedule verifier's own transports; no processes."""

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Case, Save, Step, Topology
from invariants.catalog.p2p_portable import p2p_portable
from invariants.catalog.replay import replay
from invariants.communication import ANY_SOURCE, NEW_GROUP, POINT_TO_POINT, RECV, SEND, Operation
from invariants.evidence import Evidence, Posted
from invariants.schedule.actions import Batch, Op
from invariants.schedule.families import generate
from invariants.schedule.lowering import lower
from invariants.schedule.order import ends
from invariants.schedule.table import Schedule
from invariants.target import Promises


class Rank:
    """Writes down what one rank posts and waits for."""

    def __init__(self, rank, world=2):
        self.rank, self.world = rank, tuple(range(world))
        self.posted, self.clock, self.turns, self.batches = [], count(1), {}, count(1)

    def post(self, kind, peer=-1, *, group="world", members=None, tag=0, batch=0):
        sequence = (group, kind in POINT_TO_POINT)
        turn = self.turns[sequence] = self.turns.get(sequence, 0) + 1
        number = len(self.posted)
        source = f"{kind}{number}.py:{self.rank}"
        self.posted.append(
            Operation(
                self.rank,
                number,
                kind,
                group,
                members or self.world,
                turn,
                peer=peer,
                tag=tag,
                dtype="float32",
                shape=(2,),
                tensors=1,
                bytes=8,
                batch=batch,
                source=source,
                posted=float(next(self.clock)),
            )
        )
        return number

    def send(self, peer, **options):
        return self.post(SEND, peer, **options)

    def recv(self, peer, **options):
        return self.post(RECV, peer, **options)

    def together(self, *ends):
        batch = next(self.batches)
        return [self.post(kind, peer, batch=batch) for kind, peer in ends]

    def wait(self, *numbers):
        for number in numbers:
            self.posted[number] = replace(self.posted[number], completed=float(next(self.clock)))


def judged(*ranks):
    rows = tuple(Posted(rank.rank, 1, True, False, tuple(rank.posted)) for rank in ranks)
    case = Case(topology=Topology.of(pp=len(ranks)), history=(Step(),))
    return p2p_portable.judge(Evidence("literal", case, Promises(), communication=rows))


def stuck(*ranks):
    """The transports on which it does not end, and what is said of each."""
    found = {}
    for violation in judged(*ranks).violations:
        for transport in violation.what.removeprefix("on ").split(" and "):
            found[transport] = violation
    return found


def pair():
    return Rank(0), Rank(1)


def test_two_that_face_each_other_are_stuck_alone_and_get_through_in_one_batch():
    alone, together = pair(), pair()
    for rank in alone:
        rank.wait(rank.send(1 - rank.rank), rank.recv(1 - rank.rank))
    for rank in together:
        rank.wait(*rank.together((SEND, 1 - rank.rank), (RECV, 1 - rank.rank)))
    found = stuck(*alone)
    assert set(found) == {"nccl-lazy", "nccl-eager"}
    assert found["nccl-lazy"].observed == (
        "rank 0's send of float32[2] to rank 1, send0.py:0 waits for rank 1's recv of float32[2] from rank 0, "
        "recv1.py:1, which comes after rank 1's send of float32[2] to rank 0, send0.py:1; that waits for rank 0's recv "
        "of float32[2] from rank 1, recv1.py:0, which comes after the first"
    )
    assert (found["nccl-lazy"].rank, found["nccl-lazy"].step) == (0, 1)
    assert judged(*together).status == "holds"


def test_one_that_receives_first_gets_through():
    first, second = pair()
    first.wait(first.send(1), first.recv(1))
    receive = second.recv(0)
    second.wait(receive, second.send(0))
    assert judged(first, second).status == "holds"


def test_what_goes_alone_and_what_goes_in_a_batch_never_meet_where_pairs_have_communicators():
    first, second = pair()
    first.wait(*first.together((SEND, 1)))
    second.wait(second.recv(0))
    found = stuck(first, second)
    assert set(found) == {"nccl-lazy"}
    assert found["nccl-lazy"].observed == (
        "rank 0's send of float32[2] to rank 1, send0.py:0 meets nothing: rank 1 posts no receive for it that is left, "
        "in a batch as it is"
    )


def ring(size):
    ranks = [Rank(index, size) for index in range(size)]
    for rank in ranks:
        rank.send((rank.rank + 1) % size)
        rank.recv((rank.rank - 1) % size)
    return ranks


def test_a_ring_of_sends_is_stuck_on_one_stream_only():
    assert set(stuck(*ring(3))) == {"nccl-eager"}, "each pair has a stream of its own"
    assert set(stuck(*ring(2))) == {"nccl-lazy", "nccl-eager"}
    said = stuck(*ring(3))["nccl-eager"].observed
    assert said.count(" waits for ") == 3
    assert said.count("comes after") == 3


def test_what_a_rank_waited_for_comes_before_what_it_posts_then():
    first, second = pair()
    receive = first.recv(1)
    first.send(1, group="other")
    ahead = second.recv(0, group="other")
    second.wait(ahead)
    second.send(0)
    assert judged(first, second).status == "holds", "the send of rank 0 does not wait for its receive"
    late, _ = pair()
    late.wait(late.recv(1))
    late.send(1, group="other")
    assert receive == 0
    found = stuck(late, second)
    assert set(found) == {"nccl-lazy", "nccl-eager"}
    assert "rank 0's recv of float32[2] from rank 1, recv0.py:0 waits for rank 1's send" in found["nccl-lazy"].observed


def test_a_collective_shares_the_stream_of_its_group():
    first, second = pair()
    first.send(1)
    first.post("all_reduce")
    second.post("all_reduce")
    second.recv(0)
    found = stuck(first, second)
    assert set(found) == {"nccl-eager"}, "alone, messages have a communicator for their pair"
    assert "all_reduce of float32[2] over ranks 0, 1" in found["nccl-eager"].observed
    apart = pair()
    apart[0].send(1, group="pp")
    apart[0].post("all_reduce")
    apart[1].post("all_reduce")
    apart[1].recv(0, group="pp")
    assert judged(*apart).status == "holds"


def test_groups_that_overlap_in_a_circle():
    members = {"a": (0, 1), "b": (1, 2), "c": (2, 0)}
    orders = {0: "ac", 1: "ba", 2: "cb"}
    ranks = [Rank(index, 3) for index in range(3)]
    for rank in ranks:
        for group in orders[rank.rank]:
            rank.wait(rank.post("all_reduce", group=group, members=members[group]))
    assert set(stuck(*ranks)) == {"nccl-lazy", "nccl-eager"}
    free = [Rank(index, 3) for index in range(3)]
    for rank in free:
        rank.wait(*[rank.post("all_reduce", group=group, members=members[group]) for group in orders[rank.rank]])
    assert judged(*free).status == "holds", "each group has a stream, and nobody waits in between"


def test_a_collective_that_a_member_leaves_out():
    first, second = pair()
    first.post("all_reduce")
    assert "not every member takes part" in stuck(first, second)["nccl-lazy"].observed


def test_a_collective_of_three_waits_for_the_last_of_them():
    ranks = [Rank(index, 3) for index in range(3)]
    for rank in ranks:
        rank.wait(rank.post("all_reduce"))
    assert judged(*ranks).status == "holds"
    ranks[2].posted.clear()
    assert set(stuck(*ranks)) == {"nccl-lazy", "nccl-eager"}


def test_groups_of_one_and_groups_that_are_opened_hold_nobody_up():
    first, second = pair()
    first.post(NEW_GROUP)
    first.wait(first.post("all_reduce", group="own", members=(0,)))
    first.send(1)
    second.recv(0)
    assert judged(first, second).status == "holds"


def test_tags_are_unknown_to_nccl():
    first, second = pair()
    first.send(1, tag=1)
    first.send(1, tag=2)
    second.recv(0, tag=2)
    second.recv(0, tag=1)
    lazy, eager = judged(first, second).violations
    assert lazy.what == "on nccl-lazy, send of float32[2] to rank 1, tag 1, send0.py:0 (and 1 more)"
    assert lazy.expected == "it goes to a receive with tag 1"
    assert lazy.observed == eager.observed == "rank 1's recv of float32[2] from rank 0, tag 2, recv0.py:1"


def test_no_receive_from_whoever_sends():
    first, second = pair()
    first.post(ANY_SOURCE)
    second.post("barrier")
    first.post("barrier")
    (violation,) = [each for each in judged(first, second).violations if each.observed == "any"]
    assert (violation.rank, violation.step) == (0, 1)


def test_each_run_is_replayed_by_itself():
    first, second = pair()
    first.send(1)
    second.recv(0)
    case = Case(topology=Topology.of(pp=2), history=(Step(), Save(), Step()))
    rows = tuple(
        Posted(rank.rank, step, True, resumed, tuple(rank.posted) if step == 2 else ())
        for rank in (first, second)
        for resumed, step in ((False, 1), (False, 2), (True, 2))
    )
    whole = Evidence("literal", case, Promises(), communication=rows)
    assert p2p_portable.judge(whole).status == "holds"
    silent = replace(whole, communication=(*rows[:5], replace(rows[5], operations=())))
    (violation,) = p2p_portable.judge(silent).violations
    assert violation.what == "on nccl-lazy and nccl-eager, after a load"
    assert p2p_portable.judge(replace(whole, communication=rows[:5])).status == "unknown"


def test_what_was_not_recorded_is_unknown_and_one_rank_has_nothing_to_say():
    evidence = Evidence("literal", Case(topology=Topology.of(pp=2)), Promises(), communication=())
    assert p2p_portable.judge(evidence).status == "unknown"
    assert p2p_portable.judge(replace(evidence, communication=None)).status == "unknown"
    assert judged(Rank(0, 1)).status == "not applicable"


def operations_of(schedule):
    """What ranks would post that follow the rows: a computation waits for what it needs, and posts nothing."""
    rows = schedule.rows()
    ranks = [Rank(index, len(rows)) for index in range(len(rows))]
    for rank, row in zip(ranks, rows, strict=True):
        arrived = {}
        for cell in row:
            if isinstance(cell, Batch):
                numbers = rank.together(*(end(action, schedule) for action in cell.actions))
                arrived.update({(a.op, a.stage, a.microbatch): n for a, n in zip(cell.actions, numbers, strict=True)})
            elif cell.op.exchanges:
                arrived[cell.op, cell.stage, cell.microbatch] = rank.post(*end(cell, schedule))
            else:
                needed = Op.RECV_F if cell.op is Op.FORWARD else Op.RECV_B
                if (number := arrived.get((needed, cell.stage, cell.microbatch))) is not None:
                    rank.wait(number)
    return [operation for rank in ranks for operation in rank.posted]


def end(action, schedule):
    return SEND if action.op.sends else RECV, int(schedule.placement[action.peer])


LOWERINGS = ("textbook", "receive-first", "even-first", "batched", "in-order")
PAIRS = {"nccl-lazy": True, "nccl-eager": False}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"]),
    st.sampled_from(LOWERINGS),
    st.integers(2, 4),
    st.integers(1, 3),
)
def test_it_agrees_with_the_transports_of_schedules(family, how, stages, rounds):
    schedule = lower(generate(family, stages, stages * rounds), how)
    agrees(schedule)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(LOWERINGS[:4]), st.integers(2, 4), st.integers(1, 4))
def test_it_agrees_where_cells_are_swapped(data, how, stages, microbatches):
    rows = [list(row) for row in lower(generate("1f1b", stages, microbatches), how).rows()]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(rows))
        at = data.draw(st.integers(0, len(row) - 2))
        if all(isinstance(cell, Batch) or cell.op.exchanges for cell in row[at : at + 2]):
            row[at], row[at + 1] = row[at + 1], row[at]
    agrees(Schedule.of_rows(rows))


def agrees(schedule):
    for transport, pairs in PAIRS.items():
        outcome = replay(operations_of(schedule), pairs=pairs)
        assert (outcome.stuck is None) == ends(schedule, transport), transport


@pytest.mark.parametrize("transport", PAIRS)
def test_the_agreement_is_about_something(transport):
    hang = lower(generate("1f1b", 3, 3), "textbook")
    assert not ends(hang, transport)
    assert replay(operations_of(hang), pairs=PAIRS[transport]).cycle
