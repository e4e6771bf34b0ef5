"""Shards of flat buffers: disjoint, covering, padded; and an update that equals the plain one."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from impl.grid import ConfigurationError, Grid
from impl.zero1 import FlatGroup, Rule, Zero1, shard_range

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def groups(sizes, dp):
    """The group of `sizes` on each replica; nothing communicates, so any object stands for the process group."""
    for index in range(dp):
        named = {f"p{i}": torch.nn.Parameter(torch.full((size,), float(i))) for i, size in enumerate(sizes)}
        grid = Grid(1, dp, index, torch.device("cpu"), dp_group=object() if dp > 1 else None)
        yield FlatGroup(named, grid, Rule())


@given(sizes, st.integers(1, 8))
@example([0], 3)
@example([1], 8)
@example([0, 2, 0], 3)
def test_shards_are_disjoint_and_covering(sizes, dp):
    owned = []
    for group in groups(sizes, dp):
        assert group.shard.numel() == -(-sum(sizes) // dp)
        assert group.parameters.numel() == dp * group.shard.numel()
        assert group.state["exp_avg"].numel() == group.shard.numel()
        for slot, within, (start, stop) in group.pieces():
            assert within.stop - within.start == stop - start > 0
            assert group.shard[within].equal(slot.parameter.detach()[start:stop])
            owned += [(slot.name, element) for element in range(start, stop)]
    assert sorted(owned) == [(f"p{i}", element) for i, size in enumerate(sizes) for element in range(size)]


@given(st.integers(0, 100), st.integers(1, 9))
def test_ranges_follow_one_another(elements, dp):
    edges = [shard_range(elements, dp, index) for index in range(dp)]
    assert edges[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(edges))
    assert elements <= edges[-1][1] < elements + dp


def test_parameters_and_gradients_are_views():
    group = next(groups([2, 3], 1))
    group.parameters.fill_(7)
    group.slots[1].parameter.grad.fill_(5)
    assert group.slots[0].parameter.tolist() == [7, 7]
    assert group.gradients.tolist() == [0, 0, 5, 5, 5]


def test_one_group_a_dtype_and_one_for_shared_weights_and_none_for_frozen_ones():
    def parameter(dtype=torch.float32, trained=True):
        return torch.nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=trained)

    named = {"a": parameter(), "b": parameter(torch.float64), "c": parameter(trained=False), "d": parameter()}
    zero = Zero1(named, Grid(1, 1, 0, torch.device("cpu")), Rule(), shared=["d"])
    assert [[slot.name for slot in group.slots] for group in zero.groups] == [["a"], ["b"], ["d"]]
    assert zero.state_bytes() == zero.formula_bytes() == 2 * 3 * (4 + 8 + 4)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("dp", [2, 3])
def test_steps_equal_the_plain_optimizer(worlds, kind, dp):
    """Fewer elements than ranks, a parameter without elements, and a group that does not divide."""

    def train(context, kind, dp):
        import torch

        from impl.grid import Grid
        from impl.zero1 import Rule, Zero1
        from invariants.case import Topology

        rank = context.rank
        rule = Rule(kind, 0.1, 0.01 if kind == "adamw" else 0.0)
        grid = Grid(1, dp, rank, context.device, None, context.axis_group(Topology.of(dp=dp), "dp"))
        differences = []
        for sizes in ([1], [0], [0, 1, 4], [7]):
            start = {f"p{i}": torch.linspace(-1, 1, size, dtype=torch.float64) for i, size in enumerate(sizes)}
            plain = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
            named = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
            kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
            reference = kinds[kind](plain.values(), lr=rule.lr, weight_decay=rule.weight_decay)
            zero = Zero1(named, grid, rule)
            for step in range(3):
                zero.clear()
                for name, parameter in named.items():
                    parameter.grad += (rank + 1) * (start[name] + step)
                    plain[name].grad = dp * (dp + 1) / 2 * (start[name] + step)
                zero.reduce()
                zero.update()
                zero.gather()
                reference.step()
            for name, parameter in named.items():
                assert parameter.shape == plain[name].shape
                differences.append(float((parameter - plain[name]).abs().sum()))
        return differences

    results = worlds(dp).run(train, kind, dp)
    assert all(max(differences) < 1e-12 for differences in results)
    assert results.count(results[0]) == dp


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("lion",), "optimizer=lion: expected one of adam, adamw, sgd"),
        (("adam", -1.0), "lr=-1.0"),
        (("sgd", 1.0, float("nan")), "nan"),
    ],
)
def test_rules_that_cannot_be(rule, message):
    with pytest.raises(ConfigurationError, match=message):
        Rule(*rule)


def test_a_grid_needs_its_groups():
    with pytest.raises(ConfigurationError, match="an axis of several ranks needs its group"):
        Grid(2, 1, 0, torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="grid pp=2 dp=2 needs 4 ranks: the world has 1"):
        Grid.create(2, 2, torch.device("cpu"))
