"""Known violations: what their predicate says of a case, what they cover, what of a file is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.case import Case, Save, Step, Topology
from invariants.errors import UsageError
from invariants.invariant import Verdict
from invariants.known import Known, read_known
from invariants.strategies import cases

NUMBERS = ["pp", "dp", "world", "m", "mb", "split", "frozen", "layers", "width", "steps", "window"]
TEXTS = ["schedule", "precision", "optimizer", "mask"]
TRUTHS = ["tied", "saves"]


def known(when, **more):
    return Known(**{"invariant": "a.b", "when": when, "reason": "why", "report": "where", **more})


def facts(case):
    """The names of `when`, from the definition of each."""
    sizes = dict(case.topology.axes)
    windows = [operation.batches for operation in case.history if operation != Save()]
    return {
        "pp": sizes["pp"],
        "dp": sizes["dp"],
        "world": sizes["pp"] * sizes["dp"],
        "m": case.microbatches,
        "mb": case.microbatch_size,
        "schedule": case.schedule,
        "precision": case.precision,
        "optimizer": case.optimizer.kind,
        "mask": case.mask,
        "tied": case.model.tied,
        "layers": case.model.layers,
        "width": case.model.width,
        "split": 0 if case.split is None else len(case.split),
        "frozen": len(case.frozen),
        "steps": len(windows),
        "window": max(windows),
        "saves": Save() in case.history,
        "x_none": None,
    }


def numbers():
    leaf = st.sampled_from(NUMBERS) | st.integers(-3, 9).map(str) | st.floats(-2, 2, allow_nan=False).map(repr)
    return st.recursive(
        leaf,
        lambda inner: (
            st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "%"]), inner)
            | inner.map("(-{})".format)
        ),
        max_leaves=4,
    )


def texts():
    return st.sampled_from(TEXTS) | st.sampled_from(["gpipe", "1f1b", "float32", "adam", "full", ""]).map(repr)


@st.composite
def chains(draw):
    terms = draw(st.lists(numbers(), min_size=2, max_size=3))
    signs = [draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!="])) for _ in terms[1:]]
    return terms[0] + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))


def conditions():
    one_of = st.builds("{} {} ({}, {})".format, texts(), st.sampled_from(["in", "not in"]), texts(), texts())
    equal = st.builds("{} {} {}".format, texts(), st.sampled_from(["==", "!="]), texts())
    leaf = chains() | one_of | equal | numbers() | st.sampled_from([*TRUTHS, "x_none", "x_none == None", "True", "[]"])
    return st.recursive(
        leaf,
        lambda inner: (
            st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or", "=="]), inner)
            | inner.map("(not ({}))".format)
        ),
        max_leaves=6,
    )


@settings(deadline=None)
@given(conditions(), cases())
def test_a_condition_is_what_python_makes_of_it(when, case):
    try:
        expected = bool(eval(when, {"__builtins__": {}}, facts(case)))
    except ZeroDivisionError:
        with pytest.raises(UsageError, match="modulo"):
            known(when).admits(case)
    else:
        assert known(when).admits(case) is expected


@pytest.mark.parametrize("name", [*NUMBERS, *TEXTS, *TRUTHS])
def test_every_name_is_a_fact_of_the_case(name):
    case = Case(
        topology=Topology.of(pp=2, dp=3),
        microbatches=5,
        microbatch_size=7,
        split=(1, 2, 1),
        frozen=(0,),
        mask="holes",
        history=(Step(1), Step(4), Save(), Step(2)),
    )
    assert known(f"{name} == {facts(case)[name]!r}").admits(case)
    assert not known(f"{name} != {facts(case)[name]!r}").admits(case)


def test_options_are_texts_or_none():
    case = Case(options=(("mode", "fast"),))
    assert known("x_mode == 'fast' and x_other == None and not x_other").admits(case)
    assert not known("x_mode != None and x_mode in ('slow', 'slower')").admits(case)


@pytest.mark.parametrize(
    "when",
    [
        *("", "   ", "pp >", "pp = 2", "pp; m", "(", "\0", "(" * 5000, "import os"),
        *("__import__('os').getcwd()", "pp.real", "'a'.join(schedule)", "schedule[0]", "print(pp)", "(lambda: 1)()"),
        *("pp ** 99", "pp / 2", "pp // 2", "pp << 9", "pp @ m", "~pp", "+pp", "pp is 2", "pp & m", "pp if m else dp"),
        *("(pp := 3)", "[p for p in (1, 2)]", "{p: 1}", "{1, 2}", "f'{pp}'", "b'x' in schedule", "1j", "...", "*pp"),
        *("await pp", "yield", "microbatches > 1", "PP", "None()", "x"),
    ],
)
def test_what_is_outside_the_language_is_refused_unevaluated(when):
    with pytest.raises(UsageError, match="when=") as caught:
        known(when)
    assert "expected" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@settings(deadline=None)
@given(st.text(alphabet="pm x_'1.,()[]<=+-*%:\\\n#ni", max_size=20), cases())
def test_any_text_is_a_condition_or_refused(when, case):
    try:
        admitted = known(when).admits(case)
    except UsageError as error:
        refusal = str(error)
    else:
        refusal = None if isinstance(admitted, bool) else "no answer"
    assert refusal is None or refusal.startswith(("when=", "known violation, when="))


@pytest.mark.parametrize(
    ("when", "named"),
    [
        ("pp < schedule", "not supported"),
        ("x_none < 3", "NoneType"),
        ("1 in pp", "int"),
        ("schedule + 'x'", "'gpipe' is no number"),
        ("'x' * 1000000000", "'x' is no number"),
        ("-schedule", "no number"),
        ("pp % 0", "modulo"),
        ("1" + " + 1" * 5000, "when="),
    ],
)
def test_a_condition_that_fits_no_case_is_the_users_mistake(when, named):
    with pytest.raises(UsageError, match=named):
        known(when).admits(Case())


@pytest.mark.parametrize(
    ("entry", "status", "reason", "covered"),
    [
        ({}, "violated", "", True),
        ({"invariant": "*"}, "violated", "", True),
        ({"invariant": "a.c"}, "violated", "", False),
        ({"when": "pp > 1"}, "violated", "", False),
        ({"failure": "died"}, "violated", "", True),
        ({"failure": "died"}, "unknown", "rank 1 died: killed by SIGSEGV", True),
        ({"failure": "died", "invariant": "*"}, "unknown", "rank 1 died", True),
        ({"failure": "died", "invariant": "a.c"}, "unknown", "rank 1 died", False),
        ({"failure": "died", "when": "pp > 1"}, "unknown", "rank 1 died", False),
        ({"failure": "died"}, "unknown", "rank 1 raised", False),
        ({}, "unknown", "rank 1 died", False),
        *(({"failure": ""}, status, "", False) for status in ("holds", "refused", "not applicable")),
    ],
)
def test_an_entry_covers_violations_and_only_the_failure_that_it_names(entry, status, reason, covered):
    assert known(**{"when": "pp == 1", **entry}).covers(Verdict("a.b", Case(), status, reason)) is covered


ENTRY = "[[known]]\ninvariant = 'a.b'\nwhen = 'pp > 1'\nreason = 'why'\nreport = 'where'\n"


def test_a_file_gives_its_entries_in_order(tmp_path):
    path = tmp_path / "known.toml"
    path.write_text(ENTRY + ENTRY.replace("pp > 1", "pp == 1") + "failure = 'died'\n")
    assert read_known(path) == (known("pp > 1"), known("pp == 1", failure="died"))
    path.write_text("# nothing is known\n")
    assert read_known(path) == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("known = ", "not TOML"),
        (ENTRY + "reason = 'twice'\n", "not TOML"),
        ("knwon = 3", "unknown key 'knwon'; expected .*known"),
        ("known = 3", "no list of tables"),
        ("known = [3]", "no list of tables"),
        ("[known]\nwhen = 'pp'", "no list of tables"),
        (
            ENTRY + ENTRY.replace("reason", "reasons"),
            "entry 2: unknown key 'reasons'; expected invariant, when, reason",
        ),
        (ENTRY.replace("reason = 'why'\n", ""), "entry 1: no key 'reason'; expected a text"),
        (ENTRY.replace("'where'", "''"), "entry 1: report = ''; expected a text that is not empty"),
        (ENTRY.replace("'pp > 1'", "true"), "entry 1: when = True; expected a text"),
        (ENTRY + "failure = 3", "entry 1: failure = 3; expected a text"),
        (ENTRY + "failure = ''", "entry 1: failure = ''; expected a text"),
        (
            ENTRY + ENTRY.replace("pp > 1", "pq > 1"),
            "entry 2: when='pq > 1': unknown name 'pq'; expected one of pp, dp",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named_with_entry_and_key(tmp_path, text, named):
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=named) as caught:
        read_known(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_known(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(UsageError, match="codec"):
        read_known(tmp_path / "latin.toml")
