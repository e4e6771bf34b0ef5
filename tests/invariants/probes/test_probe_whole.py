"""Wholes are put together from what ranks dumped, and compared element by element, rank by rank."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.target import MISSING, Held


@pytest.fixture
def gathered(tmp_path):
    """Dump what each rank holds, and gather it."""
    from invariants.probes.pieces import dump, pieces_of
    from invariants.probes.session import dump_path
    from invariants.probes.whole import gather

    def do(*ranks):
        for rank, held in enumerate(ranks):
            dump(dump_path(tmp_path, "m", 0, rank), pieces_of(held))
        return gather(tmp_path, "m", 0, len(ranks))

    return do


def worst(observed, expected, tolerance=0.5):
    from invariants.probes.whole import compare

    (seen,) = compare(observed, {"w": expected}, {"w": tolerance}, 1, resumed=False)
    return seen


def tensor(*values):
    import torch

    return torch.tensor(values, dtype=torch.float64)


def test_shards_make_a_whole_and_the_worst_element_is_named_with_its_rank(gathered):
    held = gathered(
        [Held("w", tensor(1, 2), (5,), flat_range=(0, 2))], [Held("w", tensor(3, 9, 5), (5,), flat_range=(2, 5))]
    )
    assert held["w"].values.tolist() == [1, 2, 3, 9, 5]
    seen = worst(held, tensor(1, 2, 3, 4, 5))
    assert (seen.rank, seen.index, seen.expected, seen.observed, seen.error) == (1, 3, 4, 9, 5)
    assert not seen.missing


def test_every_replica_is_compared_not_only_the_first(gathered):
    held = gathered([Held("w", tensor(1, 2), (2,))], [Held("w", tensor(1, 2.25), (2,))])
    seen = worst(held, tensor(1, 2))
    assert (seen.rank, seen.index, seen.error) == (1, 1, 0.25)


def test_missing_is_not_zero(gathered):
    zero = worst(gathered([Held("w", tensor(0, 0), (2,))]), tensor(0, 0))
    assert not zero.missing
    absent = worst(gathered([Held("w", MISSING, (2,))]), tensor(0, -3))
    assert (absent.missing, absent.rank, absent.index, absent.expected) == (True, 0, 1, -3)
    nobody = worst(gathered([Held("v", tensor(1), (1,))]), tensor(2, 0))
    assert (nobody.missing, nobody.rank, nobody.index) == (True, -1, 0)
    gap = worst(gathered([Held("w", tensor(1), (3,), flat_range=(0, 1))]), tensor(1, 0, 7))
    assert (gap.missing, gap.rank, gap.index) == (True, -1, 2)


def test_one_replica_without_its_copy_is_seen(gathered):
    held = gathered([Held("w", tensor(1, 2), (2,))], [Held("w", MISSING, (2,))])
    seen = worst(held, tensor(1, 2))
    assert (seen.missing, seen.rank) == (True, 1)


def test_nan_is_infinitely_wrong(gathered):
    seen = worst(gathered([Held("w", tensor(1, math.nan), (2,))]), tensor(1, 2))
    assert (seen.index, seen.error) == (1, math.inf)


def test_padding_and_counters_are_no_values(gathered):
    held = gathered([Held("pad", tensor(1), (1,), role="padding"), Held("step", tensor(1), (1,), role="counter")])
    assert held == {}


def test_a_moment_that_one_rank_never_reached_gives_nothing(tmp_path):
    from invariants.probes.pieces import dump, pieces_of
    from invariants.probes.session import dump_path
    from invariants.probes.whole import gather

    dump(dump_path(tmp_path, "m", 0, 0), pieces_of([Held("w", tensor(1), (1,))]))
    assert gather(tmp_path, "m", 0, 2) is None


def test_tensors_of_no_elements_hold(gathered):
    from invariants.probes.whole import compare

    held = gathered([Held("w", tensor(), (0,))])
    assert held["w"].present
    assert list(compare(held, {"w": tensor()}, {"w": 0.0}, 1, resumed=False)) == []


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6), st.sampled_from(["float32", "float64"]))
def test_tolerance_is_eight_times_the_same_arithmetics_error_above_the_floor(values, precision):
    import torch

    from invariants.probes.whole import tolerances, unit_roundoff

    dtype = getattr(torch, precision)
    exact = {"w": torch.tensor(values, dtype=torch.float64) / 3, "zero": torch.zeros(1, dtype=torch.float64)}
    rounded = {name: each.to(dtype) for name, each in exact.items()}
    found = tolerances(exact, [rounded, exact], dtype)
    floor = 16 * unit_roundoff(dtype) * float(exact["w"].abs().max())
    assert found["zero"] == floor, "an exact zero gets the floor of the model, not its own"
    error = float((rounded["w"].double() - exact["w"]).abs().max())
    assert found["w"] == max(8 * error, floor)
    assert unit_roundoff(torch.float32) == 2.0**-24
    assert unit_roundoff(torch.float64) == 2.0**-53


def test_one_name_for_two_shapes_is_refused(gathered):
    from invariants.errors import UsageError

    with pytest.raises(UsageError, match=r"held w: rank 1 says a global_shape of \(3,\), another piece \(2,\)"):
        gathered([Held("w", tensor(1, 2), (2,))], [Held("w", tensor(1, 2, 3), (3,))])


def test_an_error_that_is_no_rounding_is_no_tolerance():
    from invariants.errors import UsageError
    from invariants.probes.whole import tolerances

    with pytest.raises(UsageError, match="w in its own precision is far from itself in float64, by 1"):
        tolerances({"w": tensor(1, 2)}, [{"w": tensor(1, 2)}, {"w": tensor(1, 3)}], tensor(1).dtype)
