"""Operations of several ranks against their contract, from literal records; no processes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.communication import ANY_SOURCE, NEW_GROUP, POINT_TO_POINT, RECV, SEND, Operation
from invariants.contract import disagreements, unpaired

BYTES = {"float32": 4, "float64": 8, "int32": 4, "bfloat16": 2, "bool": 1, "float8_e4m3fn": 1, "": 0}


class World:
    """Notes operations as ranks do: each sequence counts its turns."""

    def __init__(self, size=2):
        self.size = size
        self.records = {rank: [] for rank in range(size)}
        self.turns = Counter()

    def post(self, rank, kind, shape=(2,), dtype="float32", **options):
        options.setdefault("members", tuple(range(self.size)))
        options.setdefault("group", "0")
        elements = 1
        for length in shape:
            elements *= length
        size = elements * BYTES[dtype]
        numbers = {"number": len(self.records[rank]), "tensors": 1, "bytes": size, "turn": 0}
        one = Operation(rank=rank, kind=kind, dtype=dtype, shape=shape, **{**numbers, **options})
        self.turns[rank, one.sequence] += 1
        turn = self.turns[rank, one.sequence]
        self.records[rank].append(Operation(**{**vars(one), "turn": options.get("turn", turn)}))
        return self

    def everyone(self, kind, **options):
        for rank in options.get("members", range(self.size)):
            self.post(rank, kind, **options)
        return self

    def disagree(self, **options):
        return [(found.feature, found.one.rank, found.rank) for found in disagreements(self.records, **options)]

    def cross(self, **options):
        return [(found.feature, found.one.rank, found.rank) for found in unpaired(self.records, **options)]


# Collectives


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("all_reduce", {"reduction": "sum"}),
        ("barrier", {"dtype": "", "shape": ()}),
        ("broadcast", {"peer": 1}),
        ("all_gather_into_tensor", {"shape": (0, 4)}),
        ("all_reduce", {"shape": ()}),
        ("all_gather", {"shape": (3,), "splits": ((3, 3),)}),
        ("reduce_scatter", {"splits": ((2, 2),)}),
        ("all_to_all_single", {"splits": ((1, 1), (1, 1))}),
    ],
)
def test_equal_collectives_agree_any_number_of_times(kind, options):
    world = World()
    for _ in range(3):
        world.everyone(kind, **options)
    assert world.disagree() == world.disagree(ended=False) == world.cross() == []


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("feature", "kind", "options"),
    [
        ("kind", "broadcast", {}),
        ("dtype", "all_reduce", {"dtype": "int32"}),
        ("reduction", "all_reduce", {"reduction": "max"}),
        ("root", "all_reduce", {"peer": 1}),
        ("shape", "all_reduce", {"shape": (3,)}),
        ("shape", "all_reduce", {"shape": (2, 1)}),
        ("shape", "all_reduce", {"tensors": 2}),
        ("shape", "all_reduce", {"bytes": 12}),
    ],
)
def test_what_differs_on_one_rank_is_named_once_and_what_follows_is_not(feature, kind, options, ended):
    world = World(3).everyone("all_reduce")
    world.post(0, "all_reduce").post(1, "all_reduce").post(2, kind, **options)
    world.everyone("barrier").post(0, "all_reduce")
    assert world.disagree(ended=ended) == [(feature, 0, 2)]
    assert world.cross() == []


def test_the_place_and_both_sides_are_told():
    world = World().everyone("barrier", dtype="", shape=())
    world.post(0, "all_reduce", reduction="sum", source="a.py:5").post(1, "all_reduce", (4,), source="b.py:7")
    (found,) = disagreements(world.records)
    assert str(found) == (
        "2nd collective of ranks 0, 1, reduction: rank 0: all_reduce of float32[2], sum over ranks 0, 1, a.py:5; "
        "rank 1: all_reduce of float32[4] over ranks 0, 1, b.py:7"
    )


def test_a_collective_that_is_left_out_shows_where_kinds_part_or_else_at_the_end():
    world = World().post(0, "barrier").everyone("all_reduce").everyone("all_reduce")
    assert world.disagree() == [("kind", 0, 1)]
    world = World().post(0, "all_reduce").everyone("all_reduce").everyone("all_reduce")
    assert world.disagree() == [("number", 0, 1)]
    (found,) = disagreements(world.records)
    assert str(found).endswith("; rank 1: none")
    assert world.disagree(ended=False) == []


def test_groups_are_judged_apart():
    world = World(4)
    world.everyone("all_reduce", group="1", members=(0, 1)).everyone("barrier", group="2", members=(2, 3))
    world.everyone("all_reduce", group="3", members=(3,))
    assert world.disagree() == []
    world.post(0, "all_reduce", group="1", members=(0, 1)).post(3, "barrier", group="2", members=(2, 3))
    assert world.disagree() == [("number", 0, 1), ("number", 3, 2)]


def test_a_group_of_one_agrees_with_itself_and_a_group_elsewhere_is_not_missed():
    assert World(1).post(0, "all_reduce").disagree() == []
    world = World(2).post(0, "all_reduce", group="9", members=(0, 5)).post(1, "barrier", group="8", members=(1,))
    assert world.disagree() == []


def test_groups_of_one_name_with_other_members_are_different_groups():
    world = World(3).post(0, "all_reduce", group="1", members=(0, 1)).post(1, "all_reduce", group="1", members=(1, 2))
    assert world.disagree(ended=False) == []
    assert world.disagree() == [("number", 0, 1), ("number", 1, 2)]


def test_all_ranks_open_groups_in_one_order():
    opened = {"dtype": "", "shape": (), "device": "store"}
    world = World(3)
    for rank in range(3):
        world.post(rank, NEW_GROUP, members=(0, 1), **opened).post(rank, NEW_GROUP, members=(1, 2), **opened)
    assert world.disagree() == []
    world.post(0, NEW_GROUP, members=(0, 1), **opened).post(1, NEW_GROUP, members=(0, 2), **opened)
    assert world.disagree() == world.disagree(ended=False) == [("members", 0, 1)]


def test_a_rank_that_does_not_open_a_group_it_is_no_member_of_is_missed():
    opened = {"members": (0, 1), "dtype": "", "shape": (), "device": "store"}
    world = World(3).post(0, NEW_GROUP, **opened).post(1, NEW_GROUP, **opened)
    assert world.disagree() == [("number", 0, 2)]
    local = {**opened, "group": "local [0, 1]"}
    assert World(3).post(0, NEW_GROUP, **local).post(1, NEW_GROUP, **local).disagree() == []
    assert World(3).post(0, NEW_GROUP, **local).disagree() == [("number", 0, 1)]


def test_tables_of_an_all_to_all_are_transposes():
    sent = [(1, 2, 0), (3, 4, 1), (0, 0, 5)]
    world = World(3)
    for rank, row in enumerate(sent):
        world.post(rank, "all_to_all_single", (sum(row),), splits=(row, tuple(other[rank] for other in sent)))
    assert world.disagree() == []
    wrong = World(3)
    for rank, row in enumerate(sent):
        received = tuple(other[rank] for other in sent)
        wrong.post(rank, "all_to_all_single", (sum(row),), splits=(row, (1, 3, 1) if rank == 0 else received))
    assert wrong.disagree() == [("part", 0, 2)]


def test_a_table_that_is_too_short_is_a_mismatch_and_no_crash():
    world = World(2).post(0, "all_to_all", splits=((2,), (2,))).post(1, "all_to_all", splits=((1, 1), (1, 1)))
    assert world.disagree() == [("part", 0, 1)]
    world = World(2).post(0, "gather", splits=((2,),), peer=0).post(1, "gather", peer=0)
    assert world.disagree() == [("part", 0, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["all_gather", "gather", "scatter"])
def test_parts_are_as_large_as_what_comes_or_goes(kind, dtype):
    root = -1 if kind == "all_gather" else 0
    table = {"peer": root, "dtype": dtype}
    uneven = World().post(0, kind, (2,), splits=((2, 3),), **table)
    uneven.post(1, kind, (3,), **table, **({"splits": ((2, 3),)} if kind == "all_gather" else {}))
    assert uneven.disagree() == []
    wrong = World().post(0, kind, (2,), splits=((2, 3),), **table)
    wrong.post(1, kind, (4,), **table, **({"splits": ((2, 4),)} if kind == "all_gather" else {}))
    assert wrong.disagree() == [("part", 0, 1)]


def test_parts_of_a_reduce_scatter_are_the_same_everywhere():
    world = World().post(0, "reduce_scatter", splits=((2, 3),)).post(1, "reduce_scatter", (3,), splits=((3, 2),))
    assert world.disagree() == [("parts", 0, 1)]


def test_operations_of_a_lost_sequence_are_not_judged():
    world = World().post(0, "all_reduce", turn=0).post(0, SEND, peer=1, turn=0)
    assert world.disagree() == world.cross() == []


# Messages


def test_messages_pair_in_order_by_sender_receiver_group_and_tag():
    world = World(3).post(0, SEND, (2,), peer=1).post(0, SEND, (3,), peer=1, tag=7).post(0, SEND, (4,), peer=2)
    world.post(1, RECV, (3,), peer=0, tag=7).post(1, RECV, (2,), peer=0).post(2, RECV, (4,), peer=0)
    world.post(0, SEND, (0,), peer=0).post(0, RECV, (0,), peer=0)
    assert world.cross() == world.disagree() == []


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("feature", "options"),
    [("dtype", {"dtype": "int32"}), ("shape", {"shape": (3,)}), ("shape", {"shape": (1, 2)}), ("bytes", {"bytes": 9})],
)
def test_what_is_received_as_something_else_is_named_once(feature, options, ended):
    world = World().post(0, SEND, peer=1).post(1, RECV, peer=0)
    world.post(0, SEND, peer=1).post(1, RECV, peer=0, **options).post(0, SEND, (9,), peer=1).post(1, RECV, peer=0)
    assert world.cross(ended=ended) == [(feature, 0, 1)]
    (found,) = unpaired(world.records)
    assert str(found).startswith(
        f"2nd message from rank 0 to rank 1, {feature}: rank 0: send of float32[2] to rank 1; "
    )


@pytest.mark.parametrize("kind", [SEND, RECV])
def test_what_is_left_over_is_named_once_all_have_ended(kind):
    world = World().post(0, kind, peer=1).post(0, kind, peer=1)
    assert world.cross() == [("number", 0, 1)]
    assert world.cross(ended=False) == []
    assert list(unpaired({0: world.records[0]})) == [], "nobody knows what rank 1 did"


def test_another_tag_is_another_message_on_gloo_and_not_on_nccl():
    for device, found in (("cpu", [("number", 0, 1), ("number", 1, 0)]), ("cuda", [])):
        world = World().post(0, SEND, peer=1, tag=1, device=device).post(1, RECV, peer=0, tag=2, device=device)
        assert world.cross() == found


def test_receives_from_any_source_take_what_named_ones_leave():
    world = World(3).post(1, SEND, (2,), peer=0).post(2, SEND, (3,), peer=0).post(1, SEND, (3,), peer=0)
    world.post(0, ANY_SOURCE, (3,)).post(0, RECV, (3,), peer=2).post(0, ANY_SOURCE, (2,))
    assert world.cross() == []


def test_with_any_source_the_whole_must_come_out_even():
    def world():
        return World(3).post(1, SEND, peer=0).post(2, SEND, peer=0).post(0, ANY_SOURCE)

    assert world().cross() == [("number", 2, 0)]
    assert world().post(0, ANY_SOURCE).cross() == []
    assert world().post(0, RECV, peer=2).cross() == []
    assert world().post(0, RECV, peer=2).post(0, RECV, peer=2).cross() == [("number", 0, 2)]
    unlike = world().post(0, ANY_SOURCE, (4,))
    assert unlike.cross(ended=False) == []
    (found,) = unpaired(unlike.records)
    assert str(found) == (
        "messages to rank 0, from whatever rank, number: rank 0: recv_anysource of float32[4] from any rank; "
        "all ranks: none"
    )


# Random programs


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_right_program_has_no_mismatch_and_each_one_that_is_broken_has(data):
    size = data.draw(st.integers(2, 4))
    world = World(size)
    for _ in range(data.draw(st.integers(1, 12))):
        sender, receiver = data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
        shape = (data.draw(st.integers(0, 3)),)
        if sender == receiver:
            world.everyone("all_reduce", shape=shape)
        else:
            world.post(sender, SEND, shape, peer=receiver).post(receiver, RECV, shape, peer=sender)
    assert world.disagree() == world.cross() == []
    rank = data.draw(st.sampled_from([rank for rank, record in world.records.items() if record]))
    record = world.records[rank]
    place = data.draw(st.integers(0, len(record) - 1))
    broken = record[place]
    record[place] = Operation(**{**vars(broken), "dtype": "int32"})
    found = world.cross() if broken.kind in POINT_TO_POINT else world.disagree()
    assert [feature for feature, _, _ in found] == ["dtype"]
    assert rank in found[0][1:]
