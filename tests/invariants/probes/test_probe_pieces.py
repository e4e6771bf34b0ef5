"""Pieces lie where they say, whatever the form in which a trainer holds them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.target import MISSING, Held

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)


@st.composite
def held_parts(draw):
    """A whole tensor of distinct values, and a part of it as `Held`, in one of the three forms."""
    import torch

    shape = draw(shapes)
    size = math.prod(shape)
    whole = torch.arange(size, dtype=torch.float64).view(shape)
    form = draw(st.sampled_from(["whole", "flat", "slices"]))
    if form == "whole":
        return whole, Held("w", whole, shape)
    if form == "flat":
        lo = draw(st.integers(0, size))
        hi = draw(st.integers(lo, size))
        return whole, Held("w", whole.flatten()[lo:hi], shape, flat_range=(lo, hi))
    bounds = []
    for length in shape:
        lo = draw(st.integers(0, length))
        bounds.append((lo, draw(st.integers(lo, length))))
    part = whole[tuple(slice(*bound) for bound in bounds)]
    return whole, Held("w", part, shape, slices=tuple(bounds))


@given(held_parts())
def test_pieces_hold_the_elements_that_they_name(drawn):
    import torch

    from invariants.probes.pieces import owned_of, pieces_of, prints_of

    whole, held = drawn
    pieces = list(pieces_of([held]))
    for piece in pieces:
        assert torch.equal(piece.values, whole.flatten()[piece.lo : piece.hi])
    assert sum(piece.hi - piece.lo for piece in pieces) == held.tensor.numel()
    assert all(a.hi < b.lo for a, b in itertools.pairwise(pieces)), "ranges that touch are one"
    owned = list(owned_of([held], 3, "parameter"))
    assert sum(each.bytes for each in owned) == 8 * held.tensor.numel()
    assert {each.whole for each in owned} <= {whole.numel()}
    norms = sum(each.norm**2 for each in prints_of([held]))
    assert norms == pytest.approx(float((held.tensor**2).sum()))


@given(held_parts())
def test_a_dump_reads_back_bit_for_bit(tmp_path_factory, drawn):
    import torch

    from invariants.probes.pieces import dump, pieces_of, read

    _, held = drawn
    path = tmp_path_factory.mktemp("dump") / "d"
    parts = [held, Held("gone", MISSING, (2, 3))]
    dump(path, pieces_of(parts))
    for written, found in zip(pieces_of(parts), read(path), strict=True):
        assert (written.name, written.lo, written.hi, written.whole) == (found.name, found.lo, found.hi, found.whole)
        assert (written.values is None) == (found.values is None)
        assert written.values is None or torch.equal(written.values, found.values)


def test_digests_see_a_bit_that_norms_do_not():
    import torch

    from invariants.probes.pieces import prints_of

    def seen(values, dtype=torch.float32):
        (each,) = prints_of([Held("w", torch.tensor(values, dtype=dtype), (len(values),))])
        return each

    one, other = seen([1.0, 2.0]), seen([2.0, 1.0])
    assert one.norm == other.norm
    assert one.digest != other.digest
    assert seen([0.0]).digest != seen([-0.0]).digest
    assert seen([1.0]).digest == seen([1.0]).digest
    assert seen([1.0], torch.bfloat16).dtype == "bfloat16"
    assert math.isnan(seen([math.nan]).norm)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (lambda torch: Held("w", torch.zeros(3), (4,)), "held w: a tensor of 3 elements for a place of 4"),
        (lambda torch: Held("w", torch.zeros(3), (4,), flat_range=(0, 2)), "a tensor of 3 elements for a place of 2"),
        (lambda torch: Held("w", torch.zeros(1), (4,), flat_range=(4, 5)), "flat_range (4, 5) lies outside of 4"),
        (lambda torch: Held("w", torch.zeros(5), (4,), slices=((0, 4),)), "a tensor of 5 elements for a place of 4"),
        (
            lambda torch: Held("w", torch.zeros(4), (4,), slices=((0, 9),)),
            "slices ((0, 9),) lie outside of the shape (4,)",
        ),
        (lambda torch: Held("w", torch.zeros(4), (4, 1), slices=((0, 4),)), "lie outside of the shape (4, 1)"),
        (
            lambda torch: Held("w", torch.zeros(1), (8,), state_key="step"),
            "held w, state 'step': a tensor of 1 elements",
        ),
        (
            lambda torch: Held("w", torch.zeros(2, dtype=torch.complex64), (2,)),
            "expected a dense tensor of real numbers",
        ),
        (lambda torch: torch.zeros(2), "held yielded a Tensor: expected Held objects"),
        (lambda torch: Held(None, torch.zeros(2), (2,)), "held: a name of None: expected a text"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(held, words):
    import torch

    from invariants.probes.pieces import pieces_of

    with pytest.raises(UsageError) as error:
        list(pieces_of([held(torch)]))
    assert words in str(error.value)
