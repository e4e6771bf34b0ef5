"""traffic.volume, judged on literal operations; no processes."""

from dataclasses import replace
from fractions import Fraction

import pytest

from invariants.case import Case, Model, Step, Topology
from invariants.catalog.payload import payload
from invariants.catalog.traffic_volume import traffic_volume
from invariants.communication import RECV, SEND, Operation
from invariants.errors import UsageError
from invariants.evidence import Evidence, Owned, Posted
from invariants.target import Promises
from invariants.traffic import Traffic

SHARDED = Traffic(gradients="reduce-scatter", parameters="gathered")
DDP = Traffic(gradients="all-reduce", parameters="kept")
DDP_AND_ZERO = Traffic(gradients="all-reduce", parameters="gathered", summed="batch")


def posted(kind, rank, members, elements, **options):
    """An operation on `elements` numbers of float32."""
    options = {"dtype": "float32", **options}
    width = 8 if options["dtype"].endswith("64") else 4
    size = {"shape": (elements,), "tensors": 1, "bytes": width * elements, **options}
    return Operation(rank, 0, kind, "group", tuple(members), 1, **size)


def every(kind, members, elements, **options):
    """The operation on each of its members."""
    return [posted(kind, rank, members, elements, **options) for rank in members]


def shares(members, elements):
    """An all-to-all of equal parts."""
    part = elements // len(members)
    return every("all_to_all_single", members, elements, splits=((part,) * len(members),) * 2)


def message(source, target, elements, **options):
    pair = sorted((source, target))
    return [
        posted(SEND, source, pair, elements, peer=target, **options),
        posted(RECV, target, pair, elements, peer=source, **options),
    ]


def parameters(topology, *sizes, width=4, trainable=True):
    """On each rank of each stage, parameters of so many elements: one tuple a stage."""
    for rank in range(topology.world_size):
        stage = topology.coordinate(rank).get("pp", 0)
        for index, size in enumerate(sizes[stage]):
            name = f"stage{stage}.{index}"
            yield Owned(rank, "parameter", name, 0, size, width * size, 0, "value", trainable, None, size)


def recorded(operations, held, promised, *, again=(), **case):
    """One step, and in fresh processes, where `again` is given, a second one."""
    case = Case(history=(Step(),), **case) if "history" not in case else Case(**case)
    ranks = range(case.topology.world_size)
    rows = [Posted(rank, 1, True, False, tuple(each for each in operations if each.rank == rank)) for rank in ranks]
    rows += [Posted(rank, 0, False, False, tuple(every("broadcast", ranks, 999, peer=0))) for rank in ranks]
    if again:
        rows += [Posted(rank, 1, True, True, tuple(each for each in again if each.rank == rank)) for rank in ranks]
    promises = Promises(layout="flat", traffic=promised)
    return Evidence("literal", case, promises, optimizer=tuple(held), communication=tuple(rows))


def replicated(operations, promised=SHARDED, sizes=(20, 10), replicas=2, **case):
    topology = Topology.of(dp=replicas)
    return recorded(operations, parameters(topology, sizes), promised, topology=topology, **case)


def judged(*arguments, **options):
    return traffic_volume.judge(replicated(*arguments, **options))


PAIR = (0, 1)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("all_reduce", {}, Fraction(2 * 3, 4) * 48),
        ("all_reduce_coalesced", {}, Fraction(2 * 3, 4) * 48),
        ("reduce_scatter_tensor", {}, Fraction(3, 4) * 48),
        ("reduce_scatter", {"splits": ((3, 3, 3, 3),)}, Fraction(3, 4) * 48),
        ("all_gather_into_tensor", {}, 3 * 48),
        ("all_gather", {}, 3 * 48),
        ("all_to_all_single", {"splits": ((1, 2, 4, 5), (2, 2, 2, 2))}, Fraction(48 * 10, 12)),
        ("all_to_all_single", {"splits": ((0, 0, 0, 0), (2, 2, 2, 2)), "bytes": 0}, 0),
        ("broadcast", {"peer": 0}, Fraction(3, 4) * 48),
        ("reduce", {"peer": 0}, Fraction(3, 4) * 48),
        ("gather", {"peer": 0}, Fraction(3, 4) * 48),
        ("scatter", {"peer": 0}, Fraction(3, 4) * 48),
        ("barrier", {}, 0),
        (SEND, {"peer": 2}, 48),
        (RECV, {"peer": 2}, 0),
    ],
)
def test_payload_by_kind(kind, options, expected):
    assert payload(posted(kind, 1, range(4), 12, **options)) == expected


def test_a_kind_without_a_formula_makes_it_unknown():
    verdict = judged(every("all_shuffle", PAIR, 30))
    assert verdict.status == "unknown"
    assert "no formula for the payload of all_shuffle" in verdict.reason


@pytest.mark.parametrize("replicas", [2, 3])
def test_reduce_scatter_and_all_gather(replicas):
    ranks = range(replicas)
    gather = every("all_gather_into_tensor", ranks, 30 // replicas)
    for reduce in (shares(ranks, 30), every("reduce_scatter_tensor", ranks, 30)):
        assert judged([*reduce, *gather], replicas=replicas).status == "holds"


def test_gradients_all_reduced_and_then_sliced_are_a_third_more():
    verdict = judged([*every("all_reduce", PAIR, 30), *every("all_gather_into_tensor", PAIR, 15)])
    (violation,) = verdict.violations
    assert (violation.what, violation.stage, violation.step) == ("bytes that each of ranks 0, 1 sends the others", 0, 1)
    assert violation.expected == "120 = (2-1)/2 x 120 bytes x (1 for gradients + 1 for parameters)"
    assert violation.observed == "180 = all_reduce 120 + all_gather_into_tensor 60"
    assert violation.excess == pytest.approx(0.5)


def test_gradients_reduced_twice_and_not_at_all():
    gather = every("all_gather_into_tensor", PAIR, 15)
    assert judged([*shares(PAIR, 30), *shares(PAIR, 30), *gather]).status == "violated"
    assert judged(gather).status == "violated"
    assert judged([]).first.observed == "none"


def test_ddp_with_and_without_a_sharded_optimizer():
    reduce = every("all_reduce", PAIR, 18) + every("all_reduce", PAIR, 12)
    owners = [*every("broadcast", PAIR, 20, peer=0), *every("broadcast", PAIR, 10, peer=1)]
    assert judged(reduce, DDP).status == "holds"
    assert judged([*reduce, *owners], DDP_AND_ZERO).status == "holds"
    assert judged(reduce, DDP_AND_ZERO).status == "violated"
    assert judged([*reduce, *owners], DDP).status == "violated"


def test_a_reduction_for_each_batch_where_one_a_window_is_promised():
    windows = {"history": (Step(2),)}
    reduce, owners = every("all_reduce", PAIR, 30), every("broadcast", PAIR, 30, peer=0)
    assert judged([*reduce, *reduce, *owners], DDP_AND_ZERO, **windows).status == "holds"
    once = replace(DDP_AND_ZERO, summed="window")
    verdict = judged([*reduce, *reduce, *owners], once, **windows)
    assert verdict.first.expected == "180 = (2-1)/2 x 120 bytes x (2 for gradients + 1 for parameters)"
    assert judged([*reduce, *owners], once, **windows).status == "holds"


def test_equal_shares_may_be_padded_and_no_more():
    def moved(elements):
        return [*shares(range(4), elements), *every("all_gather_into_tensor", range(4), elements // 4)]

    for elements, expected in ((28, "violated"), (32, "holds"), (36, "violated")):
        assert judged(moved(elements), replicas=4).status == expected, elements
    wider = replicated(moved(40), replicas=4)
    aligned = replace(wider, promises=replace(wider.promises, alignment=4))
    assert traffic_volume.judge(aligned).status == "holds"


@pytest.mark.parametrize(
    "extra",
    [
        every("all_reduce", PAIR, 1),
        every("all_reduce", PAIR, 9),
        every("all_gather_into_tensor", PAIR, 4),
        every("all_gather_into_tensor", PAIR, 500, dtype="uint8"),
        every("broadcast", PAIR, 100, dtype="int64", peer=0),
        every("barrier", PAIR, 0, dtype=""),
    ],
    ids=["loss", "metrics", "a few of each", "text", "counts", "barrier"],
)
def test_what_is_small_or_no_number_is_set_apart(extra):
    step = [*shares(PAIR, 30), *every("all_gather_into_tensor", PAIR, 15)]
    assert judged([*step, *extra]).status == "holds"


@pytest.mark.parametrize("extra", [every("all_reduce", PAIR, 10), every("all_gather_into_tensor", PAIR, 9)])
def test_what_is_as_large_as_a_parameter_is_counted(extra):
    step = [*shares(PAIR, 30), *every("all_gather_into_tensor", PAIR, 15)]
    assert judged([*step, *extra]).status == "violated"


def test_frozen_parameters_are_not_moved():
    topology = Topology.of(dp=2)
    held = [*parameters(topology, (30,)), *parameters(topology, (500,), trainable=False)]
    step = [*shares(PAIR, 30), *every("all_gather_into_tensor", PAIR, 15)]
    assert traffic_volume.judge(recorded(step, held, SHARDED, topology=topology)).status == "holds"


SIZES = {"model": Model(sequence=3, width=4), "microbatch_size": 2}
ACTIVATION = 2 * 3 * 4


def piped(operations, *sizes, promised=SHARDED, dp=1, held=None, **case):
    topology = Topology.of(pp=len(sizes), dp=dp)
    held = parameters(topology, *sizes) if held is None else held
    return traffic_volume.judge(recorded(operations, held, promised, topology=topology, **SIZES, **case))


def crossing(source, target, microbatches, elements=ACTIVATION, back=True, **options):
    for _ in range(microbatches):
        yield from message(source, target, elements, **options)
        yield from message(target, source, elements, **options) if back else ()


def test_activations_and_their_gradients_cross_each_boundary_once():
    step = [*crossing(0, 1, 3), *crossing(1, 2, 3)]
    assert piped(step, (40,), (40,), (40,), microbatches=3).status == "holds"
    missing = piped(step[:-2], (40,), (40,), (40,), microbatches=3)
    assert [(each.what, each.expected, each.observed) for each in missing.violations] == [
        ("bytes from rank 2 to rank 1", "288 = 3 microbatches x 1 x 96 bytes", "192 = send 192")
    ]
    twice = piped([*step, *message(0, 1, ACTIVATION)], (40,), (40,), (40,), microbatches=3)
    assert twice.first.observed == "384 = send 384"


def test_a_wider_dtype_is_seen_and_so_is_the_cases():
    wide = list(crossing(0, 1, 1, dtype="float64"))
    assert len(piped(wide, (40,), (40,)).violations) == 2
    assert piped(wide, (40,), (40,), precision="float64").status == "holds"


def test_a_window_has_the_microbatches_of_all_its_batches():
    assert piped(list(crossing(0, 1, 6)), (40,), (40,), microbatches=3, history=(Step(2),)).status == "holds"


def test_a_gradient_that_nobody_needs_may_be_sent_or_not():
    topology = Topology.of(pp=3)
    held = parameters(topology, (9,), (9,), (9,))
    frozen = [replace(piece, trainable=piece.rank > 0) for piece in held]
    for back in (True, False):
        step = [*crossing(0, 1, 1, back=back), *crossing(1, 2, 1)]
        assert piped(step, (9,), (9,), (9,), held=frozen).status == "holds"
    needed = [*crossing(0, 1, 1), *crossing(1, 2, 1, back=False)]
    assert piped(needed, (9,), (9,), (9,), held=frozen).status == "violated"


def test_a_weight_that_two_stages_hold_is_exchanged_once():
    topology = Topology.of(pp=2)
    held = [replace(piece, name="tied") for piece in parameters(topology, (30,), (30,))]
    step = list(crossing(0, 1, 1))
    exchanged = [*step, *message(0, 1, 30), *message(1, 0, 30)]
    assert piped(exchanged, (30,), (30,), held=held).status == "holds"
    assert piped([*step, *every("all_reduce", PAIR, 30)], (30,), (30,), held=held).status == "holds"
    assert "120 of a gradient that both hold" in piped(step, (30,), (30,), held=held).first.expected
    thrice = [replace(piece, name="tied") for piece in parameters(Topology.of(pp=3), (9,), (9,), (9,))]
    assert piped([], (9,), (9,), (9,), held=thrice).status == "not applicable"


def test_stages_and_replicas_are_counted_apart():
    def step(stage):
        ranks = (2 * stage, 2 * stage + 1)
        return [*shares(ranks, 40), *every("all_gather_into_tensor", ranks, 20)]

    both = [*step(0), *step(1), *crossing(0, 2, 1), *crossing(1, 3, 1)]
    assert piped(both, (40,), (40,), dp=2).status == "holds"
    (violation,) = piped([*both, *shares((2, 3), 40)], (40,), (40,), dp=2).violations
    assert violation.stage == 1
    (stray,) = piped([*both, *every("all_reduce", range(4), 40)], (40,), (40,), dp=2).violations
    assert stray.what == "traffic between stages and replicas both"
    assert stray.observed.startswith("960 bytes, the first in all_reduce of float32[40] over ranks 0, 1, 2, 3")


def test_stages_lie_where_the_schedule_has_them():
    topology = Topology.of(pp=2)
    evidence = recorded(list(crossing(0, 1, 2)), parameters(topology, (9,), (9,)), SHARDED, topology=topology, **SIZES)
    vee = (("0F0", "3F0"), ("1F0", "2F0"))
    assert traffic_volume.judge(replace(evidence, schedule=vee)).status == "holds"
    assert traffic_volume.judge(evidence).status == "violated"


def test_the_run_after_a_load_is_counted_too():
    step = [*shares(PAIR, 30), *every("all_gather_into_tensor", PAIR, 15)]
    assert traffic_volume.judge(replicated(step, again=step)).status == "holds"
    (violation,) = traffic_volume.judge(replicated(step, again=step[2:])).violations
    assert violation.what.startswith("after the load, bytes that each of ranks 0, 1")


def test_where_it_does_not_apply():
    assert judged([], replicas=1).status == "not applicable"
    assert judged([], None).status == "not applicable"
    tensor = recorded([], (), SHARDED, topology=Topology.of(tp=2))
    assert traffic_volume.judge(tensor).reason == "nothing is promised of traffic along tp"


def test_a_step_that_was_not_recorded_is_unknown():
    evidence = replicated([], history=(Step(), Step()))
    assert traffic_volume.judge(evidence).status == "unknown"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"gradients": "none"}, "gradients='none': expected 'reduce-scatter' or 'all-reduce'"),
        ({"parameters": True}, "parameters=True: expected 'gathered' or 'kept'"),
        ({"summed": "step"}, "summed='step': expected 'window' or 'batch'"),
    ],
)
def test_a_promise_that_is_none_is_refused(wrong, expected):
    with pytest.raises(UsageError, match=r"promises: traffic: ") as error:
        Traffic(**{"gradients": "all-reduce", "parameters": "kept", **wrong})
    assert expected in str(error.value)
