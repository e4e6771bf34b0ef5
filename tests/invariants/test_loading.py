"""Targets by name: what is found, what is refused in one line, and which name finds it again."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants.errors import UsageError
from invariants.loading import ALIASES, checked_target, load_target, spec_of
from invariants.target import Promises

SOUND = """
from invariants.target import Promises

class Adapter:
    name = "adapter"
    promises = Promises()
    def cases(self): raise AssertionError("loading a target calls nothing of it")
    def build(self, case, rank): raise AssertionError("loading a target calls nothing of it")

target = Adapter()
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module that can be imported for the length of the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("spec", [*ALIASES, "impl.target:target", "invariants.targets.torch_native:target"])
def test_a_target_is_found_by_its_spec_and_its_spec_by_the_target(spec):
    target = load_target(spec)
    assert spec_of(target) == ALIASES.get(spec, spec)
    assert load_target(spec_of(target)) is target


@pytest.mark.parametrize(
    ("spec", "text", "named"),
    [
        ("", "", r"'': expected package.module:name, or torch"),
        ("own_adapter", "", "expected package.module:name"),
        (":target", "", "expected package.module:name"),
        ("own_adapter:", "", "expected package.module:name"),
        ("own-adapter:target", "", "expected package.module:name"),
        ("own_adapter.:target", "", "expected package.module:name"),
        (".own_adapter:target", "", "expected package.module:name"),
        ("own_adapter:a.b", "", "expected package.module:name"),
        ("own_adapter.py:target", SOUND, "ModuleNotFoundError"),
        ("no_such_adapter:target", "", "ModuleNotFoundError: No module named 'no_such_adapter'"),
        ("own_adapter:target", "import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("own_adapter:target", "def broken(:", "SyntaxError"),
        ("own_adapter:target", "import sys; sys.exit(0)", "SystemExit: 0; it ends the process: .* __name__ =="),
        ("own_adapter:target", "raise SystemExit", "SystemExit: ; it ends the process"),
        ("own_adapter:target", "raise ValueError('first\\nsecond')", "ValueError: first;"),
        ("own_adapter:target", "", "has no 'target'; nor anything else that is a target"),
        ("own_adapter:targets", SOUND, "has no 'targets'; it has 'target'"),
        ("own_adapter:Adapter", SOUND, r"Adapter is a class; name an instance of it, such as target = Adapter\(\)"),
        ("own_adapter:sys", "import sys", "module has no member 'name'; expected a text"),
        ("own_adapter:target", SOUND.replace('"adapter"', "3"), "Adapter has name = 3; expected a text"),
        ("own_adapter:target", SOUND.replace("Promises()", "{}"), "promises = {}; expected an invariants.target.Pro"),
        ("own_adapter:target", SOUND.replace("promises =", "p ="), "no member 'promises'"),
        (
            "own_adapter:target",
            SOUND.replace("def cases", "def case"),
            r"no member 'cases'; expected a method cases\(\)",
        ),
        (
            "own_adapter:target",
            SOUND.replace("def build", "build = 3\n    def b"),
            "build = 3; expected a method build",
        ),
    ],
)
def test_what_is_no_target_is_refused_in_one_line(write, spec, text, named):
    write("own_adapter", text)
    with pytest.raises(UsageError, match=named) as caught:
        load_target(spec)
    assert str(caught.value).startswith(f"target {spec!r}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_where_a_module_was_looked_for_is_told_only_where_it_was_not_found(write, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    write("own_package", "")
    for name in ("no_such_adapter", "no_such_package.adapter", "own_package.adapter"):
        with pytest.raises(UsageError, match=rf"; looked in /, {tmp_path}, .*: go to its folder, or install it$"):
            load_target(f"{name}:target")
    write("own_adapter", "import no_such_adapter")
    with pytest.raises(UsageError, match=r"expected the name of a module that Python can import from here$"):
        load_target("own_adapter:target")


# A letter, so that nothing of the standard library is imported.
@settings(deadline=None)
@given(st.text(alphabet=":.-ß_ \n'\0", max_size=6))
def test_any_text_is_a_target_or_one_line(spec):
    with pytest.raises(UsageError) as caught:
        load_target(spec)
    assert len(str(caught.value).splitlines()) == 1


def test_the_source_of_what_is_no_target_is_named():
    with pytest.raises(UsageError, match=r"^suite\(\): int has no member 'name'"):
        checked_target(3, "suite()")


def test_a_target_is_found_in_the_module_of_its_class_before_those_that_import_it(write):
    target = load_target(write("zz_adapter", SOUND) + ":target")
    assert load_target(write("aa_user", "from zz_adapter import target") + ":target") is target
    assert spec_of(target) == "zz_adapter:target"


def test_a_target_is_found_where_it_was_made_if_its_class_is_from_elsewhere(write):
    write("library", SOUND)
    target = load_target(write("trainer", "from library import Adapter\nown = Adapter()") + ":own")
    assert spec_of(target) == "trainer:own"


@pytest.mark.parametrize("name", ["test_trainer", "trainer_test", "conftest"])
def test_a_target_of_a_test_module_has_no_spec(write, name):
    target = load_target(write("inner", SOUND) + ":target")
    del sys.modules["inner"]
    sys.modules[f"tests_of_it.{name}"] = module = type(sys)(f"tests_of_it.{name}")
    module.target = target
    try:
        assert spec_of(target) is None
    finally:
        del sys.modules[module.__name__]


def test_a_target_of_a_function_has_no_spec():
    class Local:
        name = "local"
        promises = Promises()

    assert spec_of(Local()) is None


def test_the_controller_imports_neither_torch_nor_hypothesis_to_load_and_store():
    script = (
        "import sys, invariants.known, invariants.store, invariants.campaign\n"
        "from invariants.loading import load_target\n"
        "load_target('torch')\n"
        "print([name for name in ('torch', 'hypothesis') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
