"""Who waits for ever: literal records, and random programs that a small simulator runs to their end."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.communication import ANY_SOURCE, NEW_GROUP, RECV, SEND, Operation
from invariants.world.liveness import Stuck, Watch, cycle, sentences, stuck_ranks
from invariants.world.record import State, opening

NOBODY = frozenset()
WHOLE = "0"


def operation(rank, kind, *, peer=-1, turn=1, tag=0, members=(0, 1), group=WHOLE, device="cpu"):
    return Operation(rank, 0, kind, group, tuple(members), turn, device, peer, tag)


def states(waiting, counts=(), size=None, threads=(), lost=()):
    """States of `size` ranks: what each waits in has been posted, and `counts` adds to that by rank."""
    found = {}
    for rank in range(size or len(waiting)):
        own = waiting[rank] if rank < len(waiting) else None
        posted = dict(dict(counts).get(rank, {}))
        if own is not None:
            posted.setdefault(own.sequence, own.turn)
        found[rank] = State(0, own, posted, (7,) if rank in threads else (), rank in lost)
    return found


def stuck(*args, done=(), busy=(), **options):
    return stuck_ranks(states(*args, **options), frozenset(done), frozenset(busy))


def test_two_that_send_to_each_other():
    sends = [operation(0, SEND, peer=1), operation(1, SEND, peer=0)]
    found = stuck(sends)
    assert found == {0: Stuck(sends[0], (1,)), 1: Stuck(sends[1], (0,))}
    assert cycle(found) == (0, 1)


def test_a_posted_receive_frees_the_send_and_who_waits_for_its_rank():
    sends = [operation(0, SEND, peer=1), operation(1, SEND, peer=0)]
    received = operation(0, RECV, peer=1).sequence
    assert stuck(sends, {0: {received: 1}}) == {}
    assert set(stuck(sends, {0: {operation(0, RECV, peer=1, tag=3).sequence: 1}})) == {0, 1}


def test_the_turn_counts():
    sends = [operation(0, SEND, peer=1, turn=3), None]
    answer = operation(1, RECV, peer=0).sequence
    assert set(stuck(sends, {1: {answer: 2}}, done=[1])) == {0}
    assert stuck(sends, {1: {answer: 3}}, done=[1]) == {}


def test_who_waits_for_one_that_computes_may_go_on():
    waits = [operation(0, "all_reduce", members=range(3)), operation(1, RECV, peer=2, members=range(3)), None]
    assert stuck(waits) == {}
    found = stuck(waits, done=[2])
    assert {rank: each.blockers for rank, each in found.items()} == {0: (1, 2), 1: (2,)}
    assert cycle(found) == ()


def test_a_ring_is_found_beside_a_rank_that_computes():
    waits = [operation(0, "all_reduce", members=range(3)), operation(1, RECV, peer=0, members=range(3)), None]
    found = stuck(waits)
    assert {rank: each.blockers for rank, each in found.items()} == {0: (1,), 1: (0,)}
    assert cycle(found) == (0, 1)


def test_a_finished_rank_is_not_stuck_itself():
    waits = [operation(0, "barrier"), operation(1, "barrier", turn=2)]
    assert set(stuck(waits, done=[0])) == {1}  # its wait is a leftover
    found = stuck(waits, done=[0])
    assert list(sentences(found, frozenset([0]))) == [
        "rank 1 waits in barrier over ranks 0, 1; rank 0 has finished without it"
    ]
    assert cycle(found) == ()


def test_groups_have_sequences_of_their_own():
    half, whole = operation(0, "barrier", group="5", members=(0, 1)), operation(1, "barrier", members=range(3))
    third = operation(2, "barrier", members=range(3))
    found = stuck([half, whole, third])
    assert {rank: each.blockers for rank, each in found.items()} == {0: (1,), 1: (0,), 2: (0,)}
    assert cycle(found) == (0, 1)
    assert list(sentences(found, NOBODY))[1] == "rank 1 waits in barrier over ranks 0, 1, 2; rank 0 has not joined"


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("all_reduce", "barrier", False),
        ("all_reduce", "all_gather", False),
        ("all_to_all", "reduce_scatter", False),
        ("all_gather", "all_gather_into_tensor", True),
        ("all_reduce", "all_reduce_coalesced", True),
        ("all_to_all", "all_to_all_single", True),
    ],
)
def test_another_collective_in_the_same_place_is_never_met(one, other, meet):
    waits = [operation(0, one, members=range(3)), operation(1, other, members=range(3)), None]
    joined = {2: {waits[0].sequence: 1}}
    found = stuck(waits, joined)
    assert {rank: each.blockers for rank, each in found.items()} == ({} if meet else {0: (1,), 1: (0,)})
    assert stuck([waits[0], replace(waits[1], turn=2), None], joined) == {}
    assert stuck(waits, joined, busy=[0, 1]) == {}


@pytest.mark.parametrize(
    ("kind", "rank", "blockers"),
    [
        *(("broadcast", 1, (0,)), ("scatter", 1, (0,)), ("broadcast", 0, None), ("scatter", 0, None)),
        *(("reduce", 0, (2,)), ("gather", 0, (2,)), ("reduce", 1, None), ("gather", 1, None)),
    ],
)
def test_a_collective_with_a_root_needs_what_flows(kind, rank, blockers):
    wait = operation(rank, kind, peer=0, members=range(3))
    others = {other: {wait.sequence: 1} for other in (0, 1) if other != rank} if rank == 0 else {}
    waits = [wait if each == rank else None for each in range(3)]
    found = stuck(waits, others, done=[each for each in range(3) if each != rank])
    assert {each: seen.blockers for each, seen in found.items()} == ({} if blockers is None else {rank: blockers})


def test_another_device_is_another_sequence():
    assert set(stuck([operation(0, "barrier"), operation(1, "barrier", device="cuda")])) == {0, 1}


def test_messages_of_nccl_know_no_tags():
    send, receive = operation(0, SEND, peer=1, tag=1, device="cuda"), operation(1, RECV, peer=0, tag=2, device="cuda")
    assert stuck([send, receive]) == {}
    assert set(stuck([replace(send, device="cpu"), replace(receive, device="cpu")])) == {0, 1}


def test_a_thread_that_may_still_communicate_frees_its_rank_even_when_it_is_done():
    waits = [operation(0, "barrier"), operation(1, RECV, peer=0)]
    assert set(stuck(waits)) == {0, 1}
    assert stuck(waits, busy=[0]) == {}
    assert stuck([None, waits[1]], done=[0], busy=[0]) == {}


@pytest.mark.parametrize("done", [(), (0,)])
def test_what_is_lost_of_a_record_may_be_anything(done):
    waits = [operation(0, "barrier"), operation(1, RECV, peer=0)]
    assert stuck(waits, lost=[0], done=done) == {}
    half = [None, operation(1, RECV, peer=0), operation(2, RECV, peer=1)]
    assert stuck(half, lost=[0]) == {}
    assert set(stuck(half, lost=[2], done=[0])) == {1}


def test_a_receive_from_anything_accuses_nobody():
    assert stuck([operation(0, ANY_SOURCE), operation(1, "barrier")]) == {}
    # It may have taken the message that the second receive would need, or not.
    waits = [operation(0, RECV, peer=1, turn=2), operation(1, "barrier")]
    taken = {operation(0, ANY_SOURCE).sequence: 1}
    assert stuck(waits, {0: taken, 1: {operation(1, SEND, peer=0).sequence: 1}}) == {}
    sends = [operation(0, "barrier", turn=2), operation(1, SEND, peer=0, turn=2)]
    assert stuck(sends, {0: taken}) == {}


@pytest.mark.parametrize("lost_sequence", [operation(0, "barrier", turn=0), operation(0, SEND, peer=1, turn=0)])
def test_an_operation_without_a_turn_accuses_nobody(lost_sequence):
    assert stuck([lost_sequence, operation(1, RECV, peer=0, tag=4)], lost=[0]) == {}


def test_a_peer_outside_the_world_accuses_nobody():
    assert stuck([operation(0, SEND, peer=7), operation(1, "barrier", members=(0, 1, 7))]) == {}


def opened(rank, members, turn=1):
    """A rank that opens a group, and what it counts by that."""
    creation = operation(rank, NEW_GROUP, members=members, turn=turn, device="store")
    return creation, {creation.sequence: turn, opening(creation): 1}


def test_groups_opened_in_another_order_are_never_met():
    (first, own), (_, others), (second, also) = opened(0, (0, 1)), opened(1, (1, 2)), opened(1, (0, 1), 2)
    assert stuck([first, None, None], {0: own}) == {}
    found = stuck([first, None, None], {0: own, 1: others})  # it computes, and yet will never open it as its first
    assert {rank: each.blockers for rank, each in found.items()} == {0: (1,)}
    assert stuck([first, None, None], {0: own, 1: others}, busy=[1]) == {}
    assert stuck([first, None, None], {0: own, 1: others}, lost=[1]) == {}
    found = stuck([first, second, None], {0: own, 1: others | also}, done=[2])
    assert {rank: each.blockers for rank, each in found.items()} == {0: (1,), 1: (0,)}
    assert stuck([first, None, None], {0: own, 1: opened(1, (0, 1))[1]}) == {}


def test_a_ring_is_told_from_the_smallest_rank_though_others_hang_on_it():
    members = range(5)
    receives = [operation(rank, RECV, peer=peer, members=members) for rank, peer in enumerate((1, 3, 0, 4, 1))]
    assert cycle(stuck(receives)) == (1, 3, 4)


# Random programs. Each step of a rank's thread is one of:
#   ("send" | "recv", peer, tag), ("recv_anysource", tag), ("barrier" | "all_reduce", group), ("new_group", members):
#   it waits
#   ("post", step): the same without waiting; ("wait", n): for the n-th of those that it has posted so
#   ("work",): it communicates nothing


@dataclass
class Posted:
    """An operation in the simulator: it is over when it has met its other side."""

    operation: Operation
    met: bool = False


@dataclass
class Thread:
    rank: int
    main: bool
    program: list
    at: int = 0
    waits: Posted | None = None
    posted: list = field(default_factory=list)

    @property
    def finished(self):
        return self.waits is None and self.at == len(self.program)


class Simulator:
    """Ranks of one world; messages and collectives meet as they are posted, in the order of each channel."""

    def __init__(self, programs, groups, seconds=None):
        self.size = len(programs)
        self.groups = groups
        self.main = [Thread(rank, True, program) for rank, program in enumerate(programs)]
        self.threads = [*self.main, *(Thread(rank, False, program) for rank, program in (seconds or {}).items())]
        self.sends, self.receives, self.joined, self.opened = [], [], {}, {}
        self.counts = [Counter() for _ in programs]
        self.turns = [0] * self.size

    def runnable(self):
        return [each for each in self.threads if not each.finished and (each.waits is None or each.waits.met)]

    def step(self, thread):
        """The thread's wait ends, or it begins its next step."""
        if thread.waits is not None:
            thread.waits = None
            self.turns[thread.rank] += thread.main
            return
        kind, *details = thread.program[thread.at]
        thread.at += 1
        if kind == "work":
            return
        if kind == "post":
            thread.posted.append(self.post(thread.rank, *details[0]))
            return
        if kind == "wait":
            if details[0] >= len(thread.posted):
                return
            found = thread.posted[details[0]]
        else:
            found = self.post(thread.rank, kind, *details)
        if kind != NEW_GROUP or thread.rank in found.operation.members:
            thread.waits = found
            self.turns[thread.rank] += thread.main

    def post(self, rank, kind, *details):
        self.turns[rank] += 1
        everyone = tuple(range(self.size))
        if kind in ("barrier", "all_reduce"):
            name = WHOLE if details[0] == 0 else f"group {details[0]}"
            found = self.noted(operation(rank, kind, members=self.groups[details[0]], group=name))
            self.meet_all(self.joined.setdefault((name, kind, found.operation.turn), []), found)
        elif kind == NEW_GROUP:
            found = self.noted(operation(rank, NEW_GROUP, members=details[0], device="store"))
            self.counts[rank][opening(found.operation)] += 1
            self.meet_all(self.opened.setdefault((found.operation.turn, details[0]), []), found)
        elif kind == SEND:
            peer, tag = details
            found = self.noted(operation(rank, SEND, peer=peer, tag=tag, members=everyone))
            self.meet(found, self.receives, lambda other: self.fits(found, other))
            self.sends.append(found)
        else:
            peer, tag = details if kind == RECV else (-1, details[0])
            found = self.noted(operation(rank, kind, peer=peer, tag=tag, members=everyone))
            self.meet(found, self.sends, lambda other: self.fits(other, found))
            self.receives.append(found)
        return found

    def noted(self, posted):
        self.counts[posted.rank][posted.sequence] += 1
        return Posted(replace(posted, turn=self.counts[posted.rank][posted.sequence]))

    @staticmethod
    def fits(send, receive):
        send, receive = send.operation, receive.operation
        ends = send.peer == receive.rank and receive.peer in (send.rank, -1)
        return ends and send.tag == receive.tag

    @staticmethod
    def meet(found, others, fits):
        first = next((other for other in others if not other.met and fits(other)), None)
        if first is not None:
            first.met = found.met = True

    @staticmethod
    def meet_all(there, found):
        there.append(found)
        members = found.operation.members
        if {each.operation.rank for each in there} >= set(members):
            for each in there:
                each.met = True

    def state(self, rank):
        waits = self.main[rank].waits
        counts = dict(self.counts[rank])
        return State(self.turns[rank], None if waits is None else waits.operation, counts, (), False)

    def done(self):
        return frozenset(thread.rank for thread in self.main if thread.finished)

    def busy(self):
        return frozenset(thread.rank for thread in self.threads if not thread.main and not thread.finished)

    def accused(self):
        return stuck_ranks({rank: self.state(rank) for rank in range(self.size)}, self.done(), self.busy())

    def run(self, choose, look=lambda: None):
        while there := self.runnable():
            self.step(choose.choice(there))
            look()

    def blocked(self):
        """When nobody can go on: the ranks whose main thread waits."""
        return {thread.rank for thread in self.main if thread.waits is not None}


@st.composite
def steps(draw, rank, groups, anything):
    size = len(groups[0])
    peers = st.sampled_from([peer for peer in range(size) if peer != rank])
    own = [index for index, members in enumerate(groups) if rank in members]
    tags = st.integers(0, 1)
    subsets = st.sampled_from([members for members in groups if len(members) > 1])
    communicating = [
        st.tuples(st.just(SEND), peers, tags),
        st.tuples(st.just(RECV), peers, tags),
        st.tuples(st.just("barrier"), st.sampled_from(own)),
    ]
    if anything:
        communicating.append(st.tuples(st.just(ANY_SOURCE), tags))
        communicating.append(st.tuples(st.just("all_reduce"), st.sampled_from(own)))
    step = st.one_of(communicating)
    others = [st.tuples(st.just("post"), step), st.tuples(st.just("wait"), st.integers(0, 2)), st.just(("work",))]
    return draw(st.lists(st.one_of(step, *others, st.tuples(st.just(NEW_GROUP), subsets)), max_size=6))


@st.composite
def right(draw, groups):
    """Programs that end: what belongs together is in the same order on all ranks."""
    size = len(groups[0])
    programs = [[] for _ in range(size)]
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from([SEND, "barrier", NEW_GROUP, "ring", "work"]))
        if kind == SEND:
            sender, receiver = draw(st.permutations(range(size)))[:2]
            tag = draw(st.integers(0, 1))
            programs[sender].append((SEND, receiver, tag))
            programs[receiver].append((RECV, sender, tag))
        elif kind == "barrier":
            group = draw(st.sampled_from(range(len(groups))))
            for rank in groups[group]:
                programs[rank].append(("barrier", group))
        elif kind == NEW_GROUP:
            members = draw(st.sampled_from(groups))
            for program in programs:
                program.append((NEW_GROUP, members))
        elif kind == "ring":
            for rank, program in enumerate(programs):
                program.append(("post", (SEND, (rank + 1) % size, 2)))
                program.append((RECV, (rank - 1) % size, 2))
                program.append(("wait", sum(step[0] == "post" for step in program) - 1))
        else:
            programs[draw(st.integers(0, size - 1))].append(("work",))
    return programs


@st.composite
def worlds_of_programs(draw, anything=False, wrong=True):
    """A simulator, where `wrong` with programs that may be anything, or nearly right."""
    size = draw(st.integers(2, 4))
    subset = st.sets(st.integers(0, size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    groups = [tuple(range(size)), *draw(st.lists(subset, max_size=2))]
    if not wrong:
        return Simulator(draw(right(groups)), groups)
    if draw(st.booleans()):
        programs = draw(right(groups))
        for _ in range(draw(st.integers(1, 3))):
            program = programs[draw(st.integers(0, size - 1))]
            if len(program) > 1:
                place = draw(st.integers(0, len(program) - 2))
                if draw(st.booleans()):
                    program[place : place + 2] = reversed(program[place : place + 2])
                else:
                    del program[place]
    else:
        programs = [draw(steps(rank, groups, anything)) for rank in range(size)]
    seconds = {}
    if draw(st.booleans()):
        rank = draw(st.integers(0, size - 1))
        seconds[rank] = draw(steps(rank, groups, anything))
    return Simulator(programs, groups, seconds)


@settings(max_examples=300)
@given(simulator=worlds_of_programs(anything=True), seed=st.integers(0, 2**32))
def test_who_is_accused_never_goes_on(simulator, seed):
    """At any moment of any run, with receives from any source, collectives that do not match and second threads too."""
    accused = {}

    def look():
        for rank, found in simulator.accused().items():
            accused.setdefault(rank, found.operation)

    simulator.run(random.Random(seed), look)
    for rank, found in accused.items():
        assert simulator.main[rank].waits is not None, f"rank {rank} went on after {found}"
        assert simulator.main[rank].waits.operation == found


@settings(max_examples=300)
@given(simulator=worlds_of_programs(), seed=st.integers(0, 2**32))
def test_all_that_wait_for_ever_are_accused_when_nobody_goes_on(simulator, seed):
    simulator.run(random.Random(seed))
    found = simulator.accused()
    if not simulator.busy():
        assert set(found) == simulator.blocked()
    for rank, each in found.items():
        assert each.operation == simulator.main[rank].waits.operation
        assert each.blockers
        assert set(each.blockers) <= (set(each.operation.members) - {rank}) & (simulator.done() | simulator.blocked())
    ring = cycle(found)
    for rank, after in zip(ring, ring[1:] + ring[:1], strict=True):
        assert after in found[rank].blockers


@settings(max_examples=200)
@given(simulator=worlds_of_programs(), seed=st.integers(0, 2**32), lost=st.integers(0, 3))
def test_a_lost_record_accuses_nobody_that_another_end_of_it_would_free(simulator, seed, lost):
    simulator.run(random.Random(seed))
    lost %= simulator.size
    known = {rank: simulator.state(rank) for rank in range(simulator.size)}
    known[lost] = replace(known[lost], lost=True)
    found = stuck_ranks(known, simulator.done(), simulator.busy())
    assert lost not in found
    assert set(found) <= simulator.blocked()
    # It is as if the rank computed.
    assert found.keys() <= simulator.accused().keys()


@settings(max_examples=200)
@given(simulator=worlds_of_programs(wrong=False), seed=st.integers(0, 2**32))
def test_programs_that_end_are_never_accused(simulator, seed):
    simulator.run(random.Random(seed), lambda: simulator.accused() and pytest.fail(f"{simulator.accused()}"))
    assert not simulator.blocked()
    assert simulator.done() == set(range(simulator.size))


class Moving:
    """A reader of a rank's record in a world that goes on between any two reads."""

    def __init__(self, simulator, rank, choose):
        self.simulator, self.rank, self.choose = simulator, rank, choose

    def go_on(self):
        for _ in range(self.choose.randrange(4)):
            if there := self.simulator.runnable():
                self.simulator.step(self.choose.choice(there))

    def pulse(self):
        self.go_on()
        return self.simulator.turns[self.rank], int(self.simulator.main[self.rank].waits is not None)

    def state(self):
        self.go_on()
        threads = tuple(7 for thread in self.simulator.threads if thread.rank == self.rank and not thread.main)
        return replace(self.simulator.state(self.rank), threads=threads)

    def runs(self, rank, thread):
        self.go_on()
        return rank in self.simulator.busy()


def watch_of(simulator, choose, folder):
    readers = {rank: Moving(simulator, rank, choose) for rank in range(simulator.size)}
    watch = Watch(folder, simulator.size, readers[0].runs)
    watch._readers = readers
    return watch


@settings(max_examples=300)
@given(simulator=worlds_of_programs(anything=True), seed=st.integers(0, 2**32))
def test_two_looks_at_a_world_that_goes_on_meanwhile_accuse_only_who_waits_for_ever(simulator, seed, tmp_path_factory):
    choose = random.Random(seed)
    watch = watch_of(simulator, choose, tmp_path_factory.getbasetemp())
    accused = {}
    while simulator.runnable():
        for rank, found in watch.look(simulator.done()).items():
            accused.setdefault(rank, found.operation)
        if there := simulator.runnable():
            simulator.step(choose.choice(there))
    for rank, found in accused.items():
        assert simulator.main[rank].waits is not None, f"rank {rank} went on after {found}"
        assert simulator.main[rank].waits.operation == found
    looks = [watch.look(simulator.done()) for _ in range(2)]
    assert looks[1] == simulator.accused()


def test_a_world_whose_records_are_not_all_there_is_not_judged(tmp_path):
    watch = Watch(tmp_path, 2, lambda rank, thread: False)
    assert watch.look(NOBODY) == {}
    assert watch.look(NOBODY) == {}
    assert watch.operations(0) == []
    watch.close()


def test_nobody_is_accused_at_the_first_look(tmp_path):
    """One look is sound as long as records are; the second is for what they tell a moment too early."""
    simulator = Simulator([[(RECV, 1, 0)], [(RECV, 0, 0)]], [(0, 1)])
    simulator.run(random.Random(0))
    watch = watch_of(simulator, random.Random(0), tmp_path)
    assert watch.look(NOBODY) == {}
    assert set(watch.look(NOBODY)) == {0, 1}
    simulator.turns[1] += 1  # it has moved and waits again
    assert watch.look(NOBODY) == {}
    assert set(watch.look(NOBODY)) == {0, 1}
