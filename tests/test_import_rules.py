"""Who may import whom, read from the syntax trees of all modules; each rule is shown to fail on a bad text."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES, FUNCTION_LINES = 300, 50

PURE = (
    "invariants.invariant",
    "invariants.evidence",
    "invariants.communication",
    "invariants.contract",
    "invariants.traffic",
    "invariants.case",
    "invariants.errors",
    "invariants.schedule",
)
CATALOG_MAY = (*PURE, "invariants.catalog", "numpy")
ON_RANKS = (
    *("invariants.probes", "invariants.targets", "invariants.world.rank", "invariants.world.state"),
    *("invariants.world.recorder", "invariants.world.groups", "invariants.world.calls", "invariants.world.buffers"),
    "invariants.world.callers",
)
PLANTED = (
    *("impl.faults", "impl.misplaced", "impl.miscommunicated", "impl.plants", "impl.variants"),
    *("impl.conditions", "impl.crossed", "impl.planting"),
)
KNOW_THE_FRAMEWORK = ("impl.target", *PLANTED)
UNPICKLES_FILES = (
    *("pickle.load", "pickle.Unpickler", "cloudpickle.load", "dill.load", "joblib.load", "marshal.load"),
    *("shelve.open", "torch.load", "numpy.load", "pandas.read_pickle"),
)
UNPICKLES_BYTES = ("pickle.loads", "cloudpickle.loads", "dill.loads", "marshal.loads")


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is `a.b.c`, whether `c` is a module or not."""

    name: str
    line: int
    lazy: bool

    def of(self, *modules: str) -> bool:
        """Whether it is one of `modules` or inside one."""
        return any(self.name == module or self.name.startswith(f"{module}.") for module in modules)


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    text: str
    package: bool = False

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return _parse(self.text)

    def within(self, *modules: str) -> bool:
        """Whether it is one of `modules` or inside one."""
        return Import(self.name, 0, lazy=False).of(*modules)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """All imports that run: at module level or, lazily, in functions; not those for type checkers alone."""
        return tuple(self._imports(self.tree, lazy=False))

    def _imports(self, node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for other in child.orelse:
                    yield from self._imports(ast.Module([other], []), lazy)
                continue
            yield from (Import(name, getattr(child, "lineno", 0), lazy) for name in self._names(child))
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from self._imports(child, lazy or inside)

    def _names(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            parts = self.name.split(".") if self.package else self.name.split(".")[:-1]
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            return [f"{base}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            return [argument.value for argument in node.args[:1] if _is_text(argument)]
        # Plugins that pytest imports with this one.
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytest_plugins":
            return [element.value for element in getattr(node.value, "elts", [node.value]) if _is_text(element)]
        return []

    def calls(self) -> Iterator[tuple[str, int]]:
        """Full dotted name, imports resolved, and line of each name or attribute, called or handed on."""
        known = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias, name in zip(node.names, self._names(node), strict=True):
                    if alias.asname or isinstance(node, ast.ImportFrom):
                        known[alias.asname or alias.name] = name
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute):
                head, dot, rest = ast.unparse(node).partition(".")
                yield known.get(head, head) + dot + rest, node.lineno


Sources = Mapping[str, Module]
Rule = Callable[[Sources], Iterable[str]]


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _loaded(sources: Sources, root: str) -> dict[str, str]:
    """What importing `root` imports, each with the module of ours that does it; names of ours are followed."""
    found = {root: root}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        for each in [item for item in sources[name].imports if not item.lazy] if name in sources else []:
            parts = each.name.split(".")
            for end in range(1, len(parts) + 1):
                prefix = ".".join(parts[:end])
                if prefix not in found:
                    found[prefix] = name
                    waiting.append(prefix)
    return found


def pure_modules_are_free_of_torch(sources: Sources) -> Iterator[str]:
    """Cases, evidence, invariants and schedules can be read without torch."""
    for module in sources.values():
        if module.within(*PURE):
            yield from (f"{module.name}:{each.line} imports {each.name}" for each in module.imports if each.of("torch"))
            if by := _loaded(sources, module.name).get("torch"):
                yield f"{module.name} loads torch through {by}"


def catalog_reads_evidence_alone(sources: Sources) -> Iterator[str]:
    """Built-in invariants import the pure modules, the standard library and numpy: they spawn nothing."""
    for module in sources.values():
        for each in module.imports if module.within("invariants.catalog") else ():
            if not each.of(*CATALOG_MAY, *sys.stdlib_module_names):
                yield f"{module.name}:{each.line} imports {each.name}"


def plugin_is_light(sources: Sources) -> Iterator[str]:
    """Loading the pytest plugin loads neither torch nor hypothesis."""
    loaded = _loaded(sources, "invariants.plugin")
    yield from (
        f"invariants.plugin loads {name} by {loaded[name]}" for name in ("torch", "hypothesis") if name in loaded
    )


def controller_is_free_of_torch(sources: Sources) -> Iterator[str]:
    """Only what runs on ranks imports torch when it is imported; the rest does so in functions, if at all."""
    for module in sources.values():
        for each in module.imports if module.within("invariants") and not module.within(*ON_RANKS) else ():
            if each.of("torch") and not each.lazy:
                yield f"{module.name}:{each.line} imports {each.name}"


def framework_does_not_know_impl(sources: Sources) -> Iterator[str]:
    """`impl` is one target among others."""
    for module in sources.values():
        for each in module.imports if module.within("invariants") else ():
            if each.of("impl"):
                yield f"{module.name}:{each.line} imports {each.name}"


def impl_knows_schedules_alone(sources: Sources) -> Iterator[str]:
    """Of the framework, `impl` imports schedules; its adapter and its faults may import more."""
    for module in sources.values():
        for each in module.imports if module.within("impl") and not module.within(*KNOW_THE_FRAMEWORK) else ():
            if each.of("invariants") and not each.of("invariants.schedule"):
                yield f"{module.name}:{each.line} imports {each.name}"


def faults_stay_outside(sources: Sources) -> Iterator[str]:
    """Nothing in `impl` imports planted faults; the adapter does when it is asked for them."""
    for module in sources.values():
        for each in module.imports if module.within("impl") and not module.within(*PLANTED) else ():
            if each.of(*PLANTED) and not (module.name == "impl.target" and each.lazy):
                yield f"{module.name}:{each.line} imports {each.name}"


def nothing_is_unpickled_from_a_file(sources: Sources) -> Iterator[str]:
    """Files are safetensors and JSON; pickles travel between a controller and its own ranks only."""
    for module in sources.values():
        for name, line in module.calls():
            if name in UNPICKLES_FILES or (name in UNPICKLES_BYTES and not module.within("invariants.world")):
                yield f"{module.name}:{line} uses {name}"


def files_and_functions_are_short(sources: Sources) -> Iterator[str]:
    """A file is read in one sitting, a function at one glance."""
    for module in sources.values():
        if (lines := len(module.text.splitlines())) > FILE_LINES:
            yield f"{module.name} has {lines} lines: at most {FILE_LINES}"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield f"{module.name}.{node.name} has {lines} lines: at most {FUNCTION_LINES}"


RULES: tuple[Rule, ...] = (
    pure_modules_are_free_of_torch,
    catalog_reads_evidence_alone,
    plugin_is_light,
    controller_is_free_of_torch,
    framework_does_not_know_impl,
    impl_knows_schedules_alone,
    faults_stay_outside,
    nothing_is_unpickled_from_a_file,
    files_and_functions_are_short,
)


@cache
def project() -> Sources:
    """Every module of the two packages."""
    modules = {}
    for path in sorted(file for package in ("invariants", "impl") for file in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        modules[name] = Module(name, path.read_text(), package)
    return modules


def texts(**by_name: str) -> Sources:
    """Modules from texts, dots in names written as two underscores."""
    return {name: Module(name, text) for name, text in ((key.replace("__", "."), by_name[key]) for key in by_name)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule):
    assert list(rule(project())) == []


def test_all_modules_are_read():
    modules = project()
    assert {"invariants", "invariants.plugin", "invariants.schedule.actions", "impl.trainer", "impl.target"} <= set(
        modules
    )
    assert modules["invariants.schedule"].package


LONG = "def f():\n" + "    pass\n" * FUNCTION_LINES

BROKEN = [
    (pure_modules_are_free_of_torch, texts(invariants__case="import torch")),
    (pure_modules_are_free_of_torch, texts(invariants__schedule__order="def f():\n from torch.nn import Module")),
    (pure_modules_are_free_of_torch, texts(invariants__evidence="from . import b", invariants__b="import torch.nn")),
    (pure_modules_are_free_of_torch, texts(invariants__errors="import importlib\nimportlib.import_module('torch')")),
    (catalog_reads_evidence_alone, texts(invariants__catalog__a="from invariants.world.pool import WorldPool")),
    (catalog_reads_evidence_alone, texts(invariants__catalog__a="from ..probes import digests")),
    (catalog_reads_evidence_alone, texts(invariants__catalog__a="def f():\n import hypothesis")),
    (plugin_is_light, texts(invariants__plugin="from hypothesis import given")),
    (plugin_is_light, texts(invariants__plugin="pytest_plugins = ('invariants.a',)", invariants__a="import torch.nn")),
    (plugin_is_light, texts(invariants__plugin="try:\n import torch\nexcept ImportError: ...")),
    (plugin_is_light, texts(invariants__plugin="from invariants.a.b import c", invariants__a="import torch")),
    (controller_is_free_of_torch, texts(invariants__campaign="if True:\n import torch.distributed as dist")),
    (controller_is_free_of_torch, texts(invariants__cli="class A:\n import torch")),
    (framework_does_not_know_impl, texts(invariants__cli="def f():\n from impl.target import target")),
    (framework_does_not_know_impl, texts(invariants__cli="__import__('impl')")),
    (impl_knows_schedules_alone, texts(impl__trainer="from invariants import case")),
    (impl_knows_schedules_alone, texts(impl__grid="def f():\n import invariants.world.pool")),
    (faults_stay_outside, texts(impl__trainer="def f():\n from impl import faults")),
    (faults_stay_outside, texts(impl__target="from impl.faults import FAULTS")),
    (nothing_is_unpickled_from_a_file, texts(impl__checkpoint="import torch as t\nt.load('x')")),
    (nothing_is_unpickled_from_a_file, texts(invariants__a="from pickle import load as read\nread(file)")),
    (nothing_is_unpickled_from_a_file, texts(invariants__a="import pickle\npickle.loads(path.read_bytes())")),
    (nothing_is_unpickled_from_a_file, texts(invariants__world__a="import pickle\nread = pickle.load")),
    (files_and_functions_are_short, texts(impl__a="\n" * (FILE_LINES + 1))),
    (files_and_functions_are_short, texts(impl__a=f"class A:\n async {LONG}".replace("\n    pass", "\n     pass"))),
]

SOUND = texts(
    invariants__plugin="def f():\n import torch, hypothesis",
    invariants__case="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import torch\nelse:\n import math",
    invariants__catalog__a="import json\nimport numpy as np\nfrom invariants.schedule.order import x\nfrom .b import y",
    invariants__probes__a="import torch",
    invariants__world__wire="import pickle\npickle.loads(data)",
    impl__schedule="from invariants.schedule.families import gpipe",
    impl__target="from invariants.case import Case\ndef f():\n from impl.faults import FAULTS",
    impl__checkpoint="import json\nfrom safetensors.torch import load\njson.load(file)\nload(data)",
    impl__long="def f():\n" + "    pass\n" * (FUNCTION_LINES - 1) + "\n" * (FILE_LINES - FUNCTION_LINES),
)


@pytest.mark.parametrize(("rule", "sources"), BROKEN)
def test_the_rule_finds_what_breaks_it(rule, sources):
    assert list(rule(sources))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_sound_modules_pass(rule):
    assert list(rule(SOUND)) == []


def test_every_rule_is_shown_to_fail():
    assert {rule for rule, _ in BROKEN} == set(RULES)
