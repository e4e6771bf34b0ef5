"""Cases as text: what is written is read again, and what could not be is no case."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Case, Model, OptimizerSpec, Save, Step, Topology
from invariants.errors import UsageError
from invariants.strategies import cases

AWKWARD = st.text(alphabet="a1,=.+ x/'\"\n\0é☃\ud800", max_size=4) | st.sampled_from(["m", "seed", "x.m", "default"])
WHOLE = st.integers(-1, 2**33) | st.sampled_from([0, 2**32 - 1, 2**32])
AXES = st.lists(st.tuples(st.text(alphabet="pdß²1.-", max_size=2), st.integers(0, 12)), max_size=3).map(tuple)
LAYERS = st.lists(st.integers(-1, 12), max_size=3).map(tuple)


@st.composite
def awkward(draw):
    """Any case that the types allow, or none where construction refuses it."""
    steps = st.lists(st.builds(Step, st.integers(0, 3)) | st.just(Save()), max_size=4)
    drawn = {
        "topology": AXES,
        "schedule": AWKWARD,
        "microbatches": st.integers(0, 99),
        "model": st.builds(Model, layers=st.integers(), tied=st.booleans()),
        "split": st.none() | LAYERS,
        "optimizer": st.builds(OptimizerSpec, lr=st.floats(), weight_decay=st.floats() | st.integers(-1, 1)),
        "frozen": LAYERS,
        "history": steps.map(tuple),
        "seed": WHOLE,
        "options": st.lists(st.tuples(AWKWARD, AWKWARD | st.integers()), max_size=3).map(tuple),
    }
    # Few at a time: of a case that is wrong everywhere, only the first mistake would be seen.
    chosen = draw(st.lists(st.sampled_from(sorted(drawn)), max_size=3, unique=True))
    return {name: draw(drawn[name]) for name in chosen}


@settings(deadline=None, max_examples=200)
@given(awkward())
def test_a_case_is_read_as_it_was_written_or_refused_in_one_line(parts):
    try:
        if "topology" in parts:
            parts["topology"] = Topology(parts["topology"])
        case = Case(**parts)
    except UsageError as error:
        text, again = str(error), None
    else:
        text, again = str(case), Case.parse(str(case)) == case
    assert len(text.splitlines()) == 1
    assert again or (again is None and "expected" in text)


@settings(deadline=None)
@given(cases(), st.dictionaries(st.sampled_from("abc"), st.sampled_from(["=", "a=b", " ", "1.5", "x.a"])))
def test_a_drawn_case_with_options_is_read_as_it_was_written(case, options):
    case = Case(**{**vars(case), "options": tuple(options.items())})
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"seed": 2**32}, "seed=4294967296"),
        ({"seed": -1}, "seed=-1"),
        ({"split": ()}, r"split=\(\)"),
        ({"schedule": "a,b"}, "schedule 'a,b'"),
        ({"schedule": ""}, "schedule ''"),
        ({"options": (("a,b", "c"),)}, "option 'a,b' = 'c'"),
        ({"options": (("a=b", "c"),)}, "option 'a=b' = 'c'"),
        ({"options": (("", "c"),)}, "option '' = 'c'"),
        ({"options": (("a", ""),)}, "option 'a' = ''"),
        ({"options": (("a", "b,c"),)}, "option 'a' = 'b,c'"),
        ({"options": (("a", 3),)}, "option 'a' = 3"),
        ({"options": (("a", "b"), ("a", "c"))}, "option 'a' is given twice"),
        ({"optimizer": OptimizerSpec(lr=float("nan"))}, "lr or decay is nan"),
    ],
)
def test_what_could_not_be_read_again_is_refused(parts, named):
    with pytest.raises(UsageError, match=f"^case: {named}.*expected"):
        Case(**parts)


def test_a_topology_has_an_axis():
    with pytest.raises(UsageError, match="topology without axes"):
        Topology(())
