"""The conformance kit on the invariant, and the invariant on whatever ranks may report."""

from hypothesis import given
from hypothesis import strategies as st
from invariants_example.losses import losses_agree

from invariants import Case, Evidence, Promises, Topology
from invariants.conformance import check_invariant
from invariants.evidence import Loss


def evidence(*reported):
    """Two steps of as many ranks as report; None is a rank that does not know the loss."""
    losses = tuple(
        Loss(rank, step, each, reference=1.0, tolerance=0.1, finite=True)
        for step in (1, 2)
        for rank, each in enumerate(reported)
    )
    return Evidence("literal", Case(topology=Topology.of(dp=len(reported))), Promises(), losses=losses)


def test_losses_agree_conforms():
    check_invariant(
        losses_agree,
        holds=[evidence(1.0), evidence(1.0, None, 1.0), evidence(None, None), evidence(float("nan"), float("nan"))],
        violated=[evidence(1.0, 1.0 + 2**-52), evidence(None, 0.0, -0.0), evidence(1.0, float("nan"))],
    )


@given(st.lists(st.none() | st.floats(allow_nan=False), min_size=1, max_size=4))
def test_it_holds_where_all_reports_are_one_number(reported):
    known = {each.hex() for each in reported if each is not None}
    assert losses_agree.judge(evidence(*reported)).status == ("violated" if len(known) > 1 else "holds")
