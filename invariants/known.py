"""Known violations: which verdicts are expected, why, and where that was reported. They are shown, and searched past.

The file is TOML. Each entry says when it holds by an expression over the case, never by code:

    [[known]]
    invariant = "gradients.reference"        # an id, or "*"
    when = "schedule == '1f1b' and m % pp"
    reason = "what is wrong, in one sentence"
    report = "where it was reported"
    failure = "text of the reason of an unknown verdict"   # optional
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from invariants.case import Case
from invariants.errors import UsageError
from invariants.invariant import Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Known:
    """One known violation; a `when` that cannot be read raises `UsageError`.

    `when` knows the case as pp, dp, world (ranks), m and mb (microbatches and their size), schedule, precision,
    optimizer, mask, tied, split (number of stages of a given split, else 0), frozen (number of frozen layers), layers,
    width, steps (number of them), window (most batches of a step), saves, and x_NAME for an option (None where the case
    has none of that name). It may use literals, comparisons, `and`, `or`, `not`, `in`, and + - * % of numbers.
    """

    invariant: str
    when: str
    reason: str
    report: str
    failure: str | None = None

    def __post_init__(self) -> None:
        _condition(self.when)

    def covers(self, verdict: Verdict) -> bool:
        """Whether this entry expects the verdict: `violated`, or `unknown` for the reason that `failure` names."""
        expected = verdict.status == "violated" or (
            verdict.status == "unknown" and self.failure is not None and self.failure in verdict.reason
        )
        return expected and self.invariant in ("*", verdict.invariant) and self.admits(verdict.case)

    def admits(self, case: Case) -> bool:
        """Whether `when` is true of the case; `UsageError` where it compares or adds what cannot be."""
        try:
            return bool(_value(_condition(self.when), _facts(case)))
        except (TypeError, ZeroDivisionError, RecursionError) as error:
            raise UsageError(f"known violation, when={self.when!r}: {error}, for case {case}") from error


def read_known(path: Path, ids: Collection[str] | None = None) -> tuple[Known, ...]:
    """The entries of a TOML file; a `UsageError` names the file, the entry, the key and what would be right.

    With `ids`, those of all invariants, an entry for another is refused.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"known violations {path}: No such file; name one that exists, of [[known]] tables, or leave it out"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"known violations {path}: {error}; expected a TOML file of [[known]] tables") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"known violations {path}: not TOML: {error}") from error
    if others := [key for key in document if key != "known"]:
        raise UsageError(f"known violations {path}: unknown key {others[0]!r}; expected [[known]] tables only")
    entries = document.get("known", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"known violations {path}: 'known' is no list of tables; expected [[known]] above each entry")
    found = []
    for number, entry in enumerate(entries, 1):
        source = f"known violations {path}, entry {number}"
        known = _entry(entry, source)
        if ids is not None and known.invariant not in ("*", *ids):
            raise UsageError(
                f"{source}: invariant {known.invariant!r} does not exist; expected one of *, {', '.join(ids)}"
            )
        found.append(known)
    return tuple(found)


def fit(known: Iterable[Known], cases: Sequence[Case]) -> None:
    """Raise `UsageError` where the `when` of an entry cannot be asked of one of `cases`."""
    for entry in known:
        for case in cases:
            entry.admits(case)


def _entry(entry: Mapping[str, object], source: str) -> Known:
    keys = [each.name for each in fields(Known)]
    for key in entry:
        if key not in keys:
            raise UsageError(f"{source}: unknown key {key!r}; expected {', '.join(keys)}")
    texts: dict[str, str] = {}
    for each in fields(Known):
        value = entry.get(each.name)
        if value is None and each.default is not MISSING:
            continue
        if not isinstance(value, str) or not value.strip():
            seen = f"{each.name} = {value!r}" if each.name in entry else f"no key {each.name!r}"
            raise UsageError(f"{source}: {seen}; expected a text that is not empty")
        texts[each.name] = value
    try:
        return Known(**texts)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error


def _facts(case: Case) -> dict[str, object]:
    """What `when` can read, by name."""
    return {
        "pp": case.topology.size("pp"),
        "dp": case.topology.size("dp"),
        "world": case.topology.world_size,
        "m": case.microbatches,
        "mb": case.microbatch_size,
        "schedule": case.schedule,
        "precision": case.precision,
        "optimizer": case.optimizer.kind,
        "mask": case.mask,
        "tied": case.model.tied,
        "split": len(case.split or ()),
        "frozen": len(case.frozen),
        "layers": case.model.layers,
        "width": case.model.width,
        "steps": len(case.windows),
        "window": max(case.windows),
        "saves": case.save_after is not None,
        **{f"x_{name}": value for name, value in case.options},
    }


_NAMES = tuple(_facts(Case()))

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
}


@cache
def _condition(text: str) -> ast.expr:
    """The checked syntax tree: nothing outside the whitelist of `_unreadable` is in it."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"when={text!r}: not an expression; expected for example pp > 1 and m < pp") from error
    for node in ast.walk(tree):
        if problem := _unreadable(node):
            raise UsageError(f"when={text!r}: {problem}")
    return tree


def _unreadable(node: ast.AST) -> str | None:
    """What is wrong with one node; its children are looked at in their turn."""
    if isinstance(node, ast.Name) and node.id not in _NAMES and not node.id.startswith("x_"):
        return f"unknown name {node.id!r}; expected one of {', '.join(_NAMES)}, or x_NAME for an option"
    if isinstance(node, ast.Constant) and not (node.value is None or isinstance(node.value, int | float | str)):
        return f"unknown literal {node.value!r}; expected a number, a text, True, False or None"
    allowed = (
        *(ast.Name, ast.Constant, ast.Tuple, ast.List, ast.expr_context),
        *(ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare, *_COMPARISONS, *_ARITHMETIC),
    )
    if not isinstance(node, allowed):
        what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        return f"{what!r} cannot be used; expected names, literals, comparisons, and, or, not, in, + - * %"
    return None


def _value(node: ast.expr, facts: Mapping[str, object]) -> Any:
    """Evaluate a tree that `_condition` let pass."""

    def value(inner: ast.expr) -> Any:
        return _value(inner, facts)

    match node:
        case ast.Name(id=name):
            return facts.get(name)
        case ast.Constant(value=literal):
            return literal
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [value(element) for element in elements]
        case ast.BoolOp(op=op, values=[*parts, last]):
            for part in parts:
                if bool(seen := value(part)) is isinstance(op, ast.Or):
                    return seen
            return value(last)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(value(operand))
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(value(left)), _number(value(right)))
        case ast.Compare(left=left, ops=ops, comparators=rights):
            terms = [left, *rights]
            return all(_COMPARISONS[type(op)](value(terms[at]), value(terms[at + 1])) for at, op in enumerate(ops))
    raise AssertionError(f"the whitelist let {ast.dump(node)} pass")


def _number(value: object) -> int | float:
    """Arithmetic is for numbers alone: a text times a number could be as large as memory."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
