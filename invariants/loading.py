"""Finding a target by the text that names it, and the text of a target that was found."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, cast

from invariants.errors import UsageError
from invariants.target import Promises, Target

ALIASES = {"torch": "invariants.targets.torch_native:target"}
"""Short names of the targets that ship with this package."""


def load_target(spec: str) -> Target:
    """The target that `spec` names: `package.module:name`, or one of `ALIASES`.

    A spec that cannot be read, does not import, names nothing or names something that is no target raises `UsageError`.
    """
    module_name, colon, name = ALIASES.get(spec, spec).partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"target {spec!r}: expected package.module:name, or {' or '.join(ALIASES)}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that ends itself has said nothing of a target
        raise UsageError(
            f"target {spec!r}: importing {module_name} failed with {_headline(error)}; {_remedy(module_name, error)}"
        ) from error
    if not hasattr(module, name):
        here = [key for key, value in vars(module).items() if not _problem(value)]
        raise UsageError(
            f"target {spec!r}: module {module_name} has no {name!r}; "
            + (f"it has {', '.join(map(repr, here))}" if here else "nor anything else that is a target")
        )
    return checked_target(getattr(module, name), f"target {spec!r}")


def checked_target(found: object, source: str) -> Target:
    """`found` as a target, or a `UsageError` that begins with `source` and says which member is missing or wrong."""
    if problem := _problem(found):
        raise UsageError(f"{source}: {problem}")
    return cast(Target, found)


def spec_of(target: object) -> str | None:
    """`package.module:name` under which `load_target` finds this very object, in a fresh process too.

    None where only a test module, a conftest or a script holds it: those have no name that is importable elsewhere.
    """
    home = type(target).__module__
    # The module of its class comes first: others merely import the target.
    for module_name in sorted(sys.modules, key=lambda each: (each != home, each)):
        if _names_itself(module_name):
            for name, value in list(getattr(sys.modules[module_name], "__dict__", {}).items()):
                if value is target and name.isidentifier():
                    return f"{module_name}:{name}"
    return None


def _names_itself(module_name: str) -> bool:
    last = module_name.rpartition(".")[2]
    return not (last in ("__main__", "conftest") or last.startswith("test_") or last.endswith("_test"))


def _problem(found: Any) -> str | None:
    """What keeps `found` from being a target; None where it is one."""
    if isinstance(found, type):
        return f"{found.__name__} is a class; name an instance of it, such as target = {found.__name__}()"
    for member, right in (("name", "a text"), ("promises", "an invariants.target.Promises")):
        kind: type = str if member == "name" else Promises
        if not isinstance(value := getattr(found, member, None), kind):
            return f"{type(found).__name__} has {_seen(found, member, value)}; expected {right}"
    for member, right in (("cases", "a method cases()"), ("build", "a method build(case, rank)")):
        if not callable(value := getattr(found, member, None)):
            return f"{type(found).__name__} has {_seen(found, member, value)}; expected {right}"
    return None


def _remedy(module_name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        folders = dict.fromkeys([os.getcwd(), *sys.path])  # noqa: PTH109 - texts, as those of sys.path
        return f"looked in {', '.join(filter(None, folders))}: go to its folder, or install it"
    if isinstance(error, SystemExit):
        return "it ends the process: keep that for when it is run, below if __name__ == '__main__'"
    return "expected the name of a module that Python can import from here"


def _seen(found: object, member: str, value: object) -> str:
    return f"{member} = {value!r}" if hasattr(found, member) else f"no member {member!r}"


def _headline(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
