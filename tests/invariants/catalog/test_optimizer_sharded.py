"""optimizer.sharded, judged on literal layouts and over their whole domain; no processes."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from invariants.case import Case, OptimizerSpec, Topology
from invariants.catalog.optimizer_sharded import optimizer_sharded
from invariants.evidence import Deviation, Evidence, Owned
from invariants.target import Promises

ADAM = {"exp_avg": 4, "exp_avg_sq": 4}
"""State keys, with bytes an element."""


def recorded(pieces, *, pp=1, dp=1, kind="adam", precision="float32", gradients=None, **promised):
    case = Case(topology=Topology.of(pp=pp, dp=dp), precision=precision, optimizer=OptimizerSpec(kind))
    promises = Promises(**{"layout": "flat", **promised})
    return Evidence("literal", case, promises, optimizer=tuple(pieces), gradients=gradients)


def status(pieces, **settings):
    return optimizer_sharded.judge(recorded(pieces, **settings)).status


def parameter(rank, name, size, trainable=True):
    return Owned(rank, "parameter", name, 0, size, 4 * size, 0, "value", trainable, None, size)


def piece(rank, name, lo, hi, key="exp_avg", group=0, width=4, role="value"):
    kind = "master" if key == "master" else "optimizer"
    state_key = None if key == "master" else key
    return Owned(rank, kind, name, lo, hi, width * (hi - lo), group, role, True, state_key, hi)


def counter(rank):
    return Owned(rank, "optimizer", "buffer", 0, 1, 4, 0, "counter", True, "step", 1)


def flat(stage, groups, dp, keys, alignment=1):
    """Equal shards of one buffer a group; `groups` are lists of the sizes of its parameters."""
    for rank in range(stage * dp, (stage + 1) * dp):
        yield counter(rank)
        for group, sizes in enumerate(groups):
            shard = alignment * -(-sum(sizes) // (dp * alignment))
            start, stop = (rank - stage * dp) * shard, (rank - stage * dp + 1) * shard
            at = 0
            for index, size in enumerate(sizes):
                name = f"stage{stage}.group{group}.parameter{index}"
                yield parameter(rank, name, size)
                lo, hi = max(start, at), min(stop, at + size)
                for key, width in keys.items() if lo < hi else ():
                    yield piece(rank, name, lo - at, hi - at, key, group, width)
                at += size
            lo = max(start, at)
            for key, width in keys.items() if lo < stop else ():
                yield piece(rank, f"buffer{stage}.{group}", lo, stop, key, group, width, "padding")


def whole(stage, sizes, dp, keys):
    """Each parameter on the rank that owns least so far, the largest first."""
    load = dict.fromkeys(range(stage * dp, (stage + 1) * dp), 0)
    for index, size in enumerate(sorted(sizes, reverse=True)):
        name = f"stage{stage}.parameter{index}"
        owner = min(load, key=load.__getitem__)
        load[owner] += size
        yield from (parameter(rank, name, size) for rank in load)
        yield from (piece(owner, name, 0, size, key, width=width) for key, width in keys.items())


def replicated(stage, sizes, dp, keys):
    for rank in range(stage * dp, (stage + 1) * dp):
        for index, size in enumerate(sizes):
            yield parameter(rank, f"stage{stage}.parameter{index}", size)
            yield from (piece(rank, f"stage{stage}.parameter{index}", 0, size, key, 0, keys[key]) for key in keys)


def laid_out(layout, stages, dp, keys, alignment=1):
    """`stages`: for each its groups, for each the sizes of its parameters."""
    for stage, groups in enumerate(stages):
        if layout == "flat":
            yield from flat(stage, groups, dp, keys, alignment)
        else:
            yield from {"whole-parameter": whole, "replicated": replicated}[layout](stage, [*chain(*groups)], dp, keys)


LAYOUTS = ["flat", "whole-parameter", "replicated"]
sizes = st.integers(1, 7)
groups = st.lists(st.lists(sizes, min_size=1, max_size=4), max_size=2)


@settings(deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.lists(groups, min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["adam", "adamw", "sgd"]),
    st.booleans(),
    st.sampled_from([("float32", 4), ("float64", 8)]),
)
def test_right_layouts_hold_over_their_domain(layout, stages, dp, alignment, kind, masters, precision):
    assume(any(stages))
    name, width = precision
    keys = {} if kind == "sgd" else dict.fromkeys(ADAM, width)
    keys |= {"master": 4} if masters else {}
    pieces = laid_out(layout, stages, dp, keys, alignment)
    settings = {"alignment": alignment, "kind": kind, "masters": masters, "precision": name}
    expected = "holds" if keys else "not applicable"
    assert status(pieces, pp=len(stages), dp=dp, layout=layout, **settings) == expected


@settings(deadline=None)
@given(st.sampled_from(LAYOUTS), st.lists(groups, min_size=1, max_size=2), st.integers(1, 4), st.data())
def test_one_piece_that_is_lost_doubled_or_wide_is_found(layout, stages, dp, data):
    assume(any(stages))
    pieces = list(laid_out(layout, stages, dp, ADAM))
    places = [index for index, each in enumerate(pieces) if each.kind == "optimizer" and each.role != "counter"]
    index = data.draw(st.sampled_from(places))
    victim = pieces[index]
    change = data.draw(st.sampled_from([(), (victim, victim), (replace(victim, bytes=2 * victim.bytes),)]))
    changed = [*pieces[:index], *change, *pieces[index + 1 :]]
    assert status(changed, pp=len(stages), dp=dp, layout=layout) == "violated"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_parameter_under_another_key(layout):
    pieces = list(laid_out(layout, [[[2, 3]]], 2, ADAM))
    index = next(index for index, each in enumerate(pieces) if each.state_key == "exp_avg")
    pieces[index] = replace(pieces[index], state_key="other")
    assert status(pieces, dp=2, layout=layout) == "violated"


@settings(deadline=None)
@given(groups, st.integers(2, 4))
def test_state_that_is_not_sharded_is_held_by_all_ranks(stage, dp):
    assume(stage)
    alone = [each for rank in range(dp) for each in flat(0, stage, 1, ADAM)]
    count = len(alone) // dp
    copies = [replace(each, rank=index // count) for index, each in enumerate(alone)]
    verdict = optimizer_sharded.judge(recorded(copies, dp=dp))
    overlaps = [violation for violation in verdict.violations if violation.observed.startswith("held by ranks 0, 1")]
    assert len(overlaps) == 2 * sum(map(len, stage))
    assert all(violation.tensor for violation in overlaps)


def test_one_element_over_many_ranks():
    evidence = recorded(flat(0, [[1]], 4, ADAM), dp=4)
    assert optimizer_sharded.judge(evidence).status == "holds"
    unpadded = [each for each in evidence.optimizer if each.role != "padding"]
    verdict = optimizer_sharded.judge(recorded(unpadded, dp=4))
    assert [(v.rank, v.expected, v.observed) for v in verdict.violations] == [
        (rank, "8 = 8 x (ceil(1/4))", "0") for rank in (1, 2, 3)
    ]


def test_the_formula_is_shown_with_groups_and_alignment():
    pieces = list(flat(0, [[5, 2], [3]], 2, ADAM, alignment=4))
    wrong = [*pieces, piece(1, "buffer", 0, 1, role="padding")]
    (violation,) = optimizer_sharded.judge(recorded(wrong, dp=2, alignment=4)).violations
    assert (violation.rank, violation.stage, violation.observed) == (1, 0, "68")
    assert violation.expected == "64 = 8 x (4 ceil(7/8) + 4 ceil(3/8))"


def test_alignment_that_was_not_promised():
    pieces = list(flat(0, [[5]], 2, ADAM, alignment=4))
    assert status(pieces, dp=2, alignment=4) == "holds"
    assert status(pieces, dp=2) == "violated"


def test_twelve_bytes_an_element_with_masters():
    held = [parameter(0, "w", 3), *(piece(0, "w", 0, 3, key) for key in (*ADAM, "master"))]
    assert status(held, masters=True) == "holds"
    verdict = optimizer_sharded.judge(recorded(held))
    assert [(v.what, v.expected, v.observed) for v in verdict.violations] == [
        ("tensors of state for each parameter", "2", "3: exp_avg, exp_avg_sq, master"),
        ("bytes of optimizer state", "24 = 8 x (ceil(3/1))", "36"),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_state_at_all(layout):
    verdict = optimizer_sharded.judge(recorded([parameter(0, "w", 3)], layout=layout))
    assert verdict.first.what == "tensors of state for each parameter"
    assert verdict.first.observed == "0: none"


def test_shards_that_leave_a_gap_and_overlap_name_ranks_and_elements():
    shards = [piece(rank, "w", lo, hi, key) for rank, lo, hi in ((0, 0, 3), (1, 2, 5)) for key in ADAM]
    pieces = [*shards, *(parameter(rank, "w", 6) for rank in (0, 1))]
    verdict = optimizer_sharded.judge(recorded(pieces, dp=2))
    assert [(v.what, v.rank, v.tensor, v.expected, v.observed) for v in verdict.violations] == [
        (f"{key}, {elements}", rank, "w", "held by one of ranks 0, 1", observed)
        for key in ADAM
        for elements, rank, observed in (
            ("element 2", 1, "held by ranks 0, 1"),
            ("element 5", None, "held by none"),
        )
    ]


def test_the_last_parameter_without_a_place():
    verdict = optimizer_sharded.judge(recorded([*flat(0, [[4]], 2, ADAM), parameter(0, "lost", 2)], dp=2))
    assert {(violation.tensor, violation.what) for violation in verdict.violations} == {
        ("lost", f"{key}, elements 0 to 1") for key in ADAM
    }


def test_state_of_a_frozen_parameter_is_surplus():
    frozen = [parameter(rank, "frozen", 2, trainable=False) for rank in (0, 1)]
    pieces = [*flat(0, [[4]], 2, ADAM), *frozen]
    assert status(pieces, dp=2) == "holds"
    surplus = [piece(0, "frozen", 0, 2, key) for key in ADAM]
    verdict = optimizer_sharded.judge(recorded([*pieces, *surplus], dp=2))
    places = [violation for violation in verdict.violations if violation.tensor == "frozen"]
    assert {(v.rank, v.expected) for v in places} == {(0, "no state, for it is not trained there")}


def test_a_stage_all_of_whose_layers_are_frozen_holds_nothing():
    frozen = [parameter(rank, "early", 5, trainable=False) for rank in (0, 1)]
    trained = list(flat(1, [[3]], 2, ADAM))
    assert status([*frozen, *trained], pp=2, dp=2) == "holds"
    stray = piece(0, "early", 0, 5)
    verdict = optimizer_sharded.judge(recorded([*frozen, *trained, stray], pp=2, dp=2))
    assert [(v.stage, v.rank, v.expected) for v in verdict.violations] == [
        (0, 0, "no state, for it is not trained there"),
        (0, 0, "24 = 8 x (ceil(5/2))"),
        (0, 1, "24 = 8 x (ceil(5/2))"),
    ]


def test_a_tied_weight_counts_on_both_of_its_stages():
    def tied(stage):
        pieces = list(flat(stage, [[4], [3]], 2, ADAM))
        return [replace(each, name="token") if "group1.parameter0" in each.name else each for each in pieces]

    assert status([*tied(0), *tied(1)], pp=2, dp=2) == "holds"
    without = [each for each in tied(1) if each.name != "token" or each.kind == "parameter"]
    verdict = optimizer_sharded.judge(recorded([*tied(0), *without], pp=2, dp=2))
    assert {(violation.stage, violation.tensor) for violation in verdict.violations if violation.tensor} == {
        (1, "token")
    }


def test_a_whole_parameter_may_be_as_uneven_as_the_largest_makes_it():
    names = {"large": 9, "small": 1}
    parameters = [parameter(rank, name, size) for name, size in names.items() for rank in (0, 1)]
    on_0 = [piece(0, name, 0, size, key) for name, size in names.items() for key in ADAM]
    assert status([*parameters, *on_0], dp=2, layout="whole-parameter") == "holds"
    assert status([*parameters, *on_0], dp=2) == "violated"


def test_whole_parameters_all_on_one_rank_are_beyond_the_bound():
    parameters = [parameter(rank, f"w{index}", 2) for index in range(4) for rank in (0, 1)]
    state = [piece(0, f"w{index}", 0, 2, key) for index in range(4) for key in ADAM]
    (violation,) = optimizer_sharded.judge(recorded([*parameters, *state], dp=2, layout="whole-parameter")).violations
    assert (violation.rank, violation.expected, violation.observed) == (0, "at most 48 = 8 x (8/2 + 2)", "64")
    assert violation.excess == pytest.approx(64 / 48)


@pytest.mark.parametrize("cut", [[(0, 0, 2, "exp_avg"), (1, 2, 4, "exp_avg")], [(1, 0, 4, "exp_avg")]])
def test_a_whole_parameter_on_two_ranks_is_not_whole(cut):
    pieces = [parameter(rank, "w", 4) for rank in (0, 1)]
    pieces += [piece(rank, "w", lo, hi, key) for rank, lo, hi, key in (*cut, (0, 0, 4, "exp_avg_sq"))]
    verdict = optimizer_sharded.judge(recorded(pieces, dp=2, layout="whole-parameter"))
    assert "state of one parameter" in {violation.what for violation in verdict.violations}
    assert "on ranks 0, 1" in {violation.observed for violation in verdict.violations}


def test_an_empty_piece_is_no_second_place():
    pieces = [parameter(rank, "w", 4) for rank in (0, 1)]
    pieces += [piece(rank, "w", 0, hi, key) for rank, hi in ((0, 4), (1, 0)) for key in ADAM]
    assert status(pieces, dp=2, layout="whole-parameter") == "holds"
    assert status([*flat(0, [[4]], 2, ADAM), piece(1, "stage0.group0.parameter0", 0, 0)], dp=2) == "holds"


def test_a_replica_that_lacks_what_the_other_has():
    pieces = list(replicated(0, [3], 2, ADAM))
    lacking = [each for each in pieces if (each.rank, each.state_key) != (1, "exp_avg_sq")]
    verdict = optimizer_sharded.judge(recorded(lacking, dp=2, layout="replicated"))
    assert [(v.what, v.expected, v.observed) for v in verdict.violations] == [
        ("exp_avg_sq, elements 0 to 2", "held by rank 1", "held by none"),
        ("bytes of optimizer state", "24 = 8 x (3 trained elements)", "12"),
    ]


def test_state_in_another_precision_than_the_case():
    pieces = list(flat(0, [[4]], 2, ADAM))
    verdict = optimizer_sharded.judge(recorded(pieces, dp=2, precision="float64"))
    assert [(v.expected, v.observed) for v in verdict.violations] == [("32 = 16 x (ceil(4/2))", "16")] * 2


def test_sgd_that_keeps_state_all_the_same():
    pieces = [parameter(0, "w", 2), piece(0, "w", 0, 2, "momentum_buffer")]
    assert status(pieces[:1], kind="sgd") == "not applicable"
    assert status([*pieces[:1], counter(0)], kind="sgd") == "not applicable"
    assert status(pieces, kind="sgd") == "violated"


def test_nothing_recorded_is_unknown_and_no_pass():
    assert status([]) == "unknown"
    assert status([parameter(0, "w", 2, trainable=False)]) == "unknown"


@settings(deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    groups,
    st.integers(1, 3),
    st.sampled_from(["adam", "adamw", "sgd"]),
    st.integers(0, 3),
    st.sampled_from([("float32", 4), ("float64", 8)]),
)
def test_the_promised_number_of_tensors_comes_before_the_cases_optimizer(layout, stage, dp, kind, count, precision):
    assume(stage)
    name, width = precision
    settings = {"dp": dp, "layout": layout, "kind": kind, "precision": name}
    pieces = list(laid_out(layout, [stage], dp, {f"state{index}": width for index in range(count)}))
    assert status(pieces, state_tensors=count, **settings) == ("holds" if count else "not applicable")
    assert status(pieces, state_tensors=count + 1, **settings) == "violated"


def test_momentum_of_sgd_is_state_where_it_is_promised():
    pieces = [parameter(0, "w", 2), piece(0, "w", 0, 2, "momentum_buffer")]
    assert status(pieces, kind="sgd", state_tensors=1) == "holds"
    assert status(pieces, kind="sgd", state_tensors=1, precision="float64") == "violated"
    verdict = optimizer_sharded.judge(recorded(pieces, kind="sgd", state_tensors=2))
    assert (verdict.first.expected, verdict.first.observed) == ("2", "1: momentum_buffer")


def gradient(name, step=1, missing=False):
    return Deviation(name, step, -1 if missing else 0, 0, 0.0, 0.0, 0.0, 1e-6, missing=missing)


def with_unused(layout, keys=()):
    """A layout of two ranks, and a parameter `unused` on both, with state of `keys` on the first."""
    used = list(laid_out(layout, [[[3, 2]]], 2, ADAM))
    names = {each.name for each in used if each.kind == "parameter"}
    extra = [*(parameter(rank, "unused", 4) for rank in (0, 1)), *(piece(0, "unused", 0, 4, key) for key in keys)]
    return [*used, *extra], [gradient(name) for name in names]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], "holds"),
        ([gradient("unused", 1, missing=True), gradient("unused", 2, missing=True)], "holds"),
        ([gradient("unused", 1, missing=True), gradient("unused", 2)], "violated"),
        ([gradient("unused")], "violated"),
    ],
)
def test_a_parameter_that_never_gets_a_gradient_has_no_state(layout, own, expected):
    pieces, others = with_unused(layout)
    assert status(pieces, dp=2, layout=layout, gradients=(*others, *own)) == expected


@pytest.mark.parametrize("gradients", [None, ()], ids=["not recorded", "nothing recorded"])
def test_without_a_record_of_gradients_every_trainable_parameter_has_state(gradients):
    pieces, _ = with_unused("whole-parameter")
    assert status(pieces, dp=2, layout="whole-parameter", gradients=gradients) == "violated"


def test_state_of_a_parameter_without_a_gradient_is_judged_where_it_is_held():
    for keys, expected in ((ADAM, "holds"), (["exp_avg"], "violated")):
        pieces, others = with_unused("whole-parameter", keys)
        assert status(pieces, dp=2, layout="whole-parameter", gradients=tuple(others)) == expected
    pieces, others = with_unused("replicated", ADAM)
    assert status(pieces, dp=2, layout="replicated", gradients=tuple(others)) == "violated"


def test_no_gradient_at_all_is_no_pass():
    missing = (gradient("w", missing=True),)
    assert status([parameter(0, "w", 2)], gradients=missing) == "not applicable"
    assert status([parameter(0, "w", 2, trainable=False)], gradients=missing) == "unknown"
    stray = piece(0, "frozen", 0, 2)
    assert status([parameter(0, "w", 2), stray], gradients=missing) == "unknown"
