"""The fixtures `worlds` and `world`, their options and marker, and the resets between tests and examples."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from invariants.world import reports
from invariants.world.guard import LIMIT_S, allowed, refusal
from invariants.world.launched.controller import fleet_of

if TYPE_CHECKING:
    from invariants.world.pool import WorldPool
    from invariants.world.world import World

BACKENDS = ("auto", "gloo", "nccl")
MARKER = "worlds(*sizes, deadline=SECONDS): run the test once on a world of each size, by default 2 ranks"
PRELOAD = ("pytest", "_pytest.assertion.rewrite")
"""What the functions of test modules refer to, once pytest has rewritten their assertions."""

preload = pytest.StashKey[set[str]]()
"""Further modules that ranks of this session need, for who collects tests to add."""
_pool = pytest.StashKey["WorldPool"]()
_default_s = pytest.StashKey[float]()
_deadline_s = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("invariants", "invariants of distributed training")
    group.addoption(
        "--backend",
        default="auto",
        metavar="auto|gloo|nccl",
        help="backend of worlds; auto is nccl where each rank has a GPU of its own, else gloo (default: auto)",
    )
    group.addoption(
        "--world-deadline",
        metavar="SECONDS",
        help="how long one call on a world may take, unless its test's marker says (default: the ini's, else 30)",
    )
    parser.addini("world_deadline", "seconds that one call on a world may take", default="30")


def pytest_configure(config: pytest.Config) -> None:
    """Check the options."""
    config.stash[preload] = set()
    config.addinivalue_line("markers", MARKER)
    backend = config.getoption("--backend")
    if backend not in BACKENDS:
        raise pytest.UsageError(f"--backend={backend}: expected one of {', '.join(BACKENDS)}")
    given = config.getoption("--world-deadline")
    name, value = (
        ("--world-deadline", given) if given is not None else ("world_deadline", config.getini("world_deadline"))
    )
    config.stash[_default_s] = config.stash[_deadline_s] = _seconds(name, value)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not allowed(seconds):
        raise pytest.UsageError(f"{name}={value}: expected a number of seconds above 0 and below {LIMIT_S:g}")
    return seconds


class Worlds:
    """What the fixture `worlds` is: worlds by size, of `pool`, the session's."""

    def __init__(self, pool: WorldPool) -> None:
        self.pool = pool

    def __call__(self, size: int) -> World:
        """The warm world of `size` ranks; skips the test where the backend cannot have it."""
        self._skip_lacking(size)
        return self.pool.get(size)

    def fresh(self, size: int) -> World:
        """A world of new processes; close it, or leave it to the end of the session."""
        self._skip_lacking(size)
        return self.pool.fresh(size)

    def _skip_lacking(self, size: int) -> None:
        if reason := self.pool.lacking(size):
            pytest.skip(reason)


def shared_folder(config: pytest.Config, factory: pytest.TempPathFactory) -> Path:
    """The session's temporary folder that all workers of xdist share."""
    base = factory.getbasetemp()
    return base.parent if hasattr(config, "workerinput") else base


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """A factory of worlds: `worlds(4)` is warm and reused, `worlds.fresh(4)` has new processes."""
    from invariants.world.pool import WorldPool

    _warn_of_outer_limit(request.config)
    more = request.config.stash[preload]
    config, workers_share = request.config, shared_folder(request.config, tmp_path_factory)
    fleet = fleet_of(config)
    if fleet is not None:
        fleet.muster(tmp_path_factory.getbasetemp(), (*PRELOAD, *sorted(more)))
    pool = WorldPool(
        tmp_path_factory.getbasetemp(),
        backend=config.getoption("--backend"),
        deadline_s=config.stash[_deadline_s],
        slots=workers_share if hasattr(config, "workerinput") else None,
        preload=(*PRELOAD, *sorted(more)),
        starter=fleet,
        relay=True,
        live=reports.shows_live(config),
    )
    with pool:
        config.stash[_pool] = pool
        yield Worlds(pool)
        del config.stash[_pool]


def _warn_of_outer_limit(config: pytest.Config) -> None:
    """pytest-timeout ends the whole process where it comes first, before anybody has said which rank is stuck."""
    if not config.pluginmanager.hasplugin("timeout"):
        return
    outer_s, deadline_s = float(config.getoption("timeout", None) or 0), config.stash[_default_s]
    outer_s = outer_s or float(config.getini("timeout") or 0)
    if 0 < outer_s <= deadline_s:
        warnings.warn(
            f"the timeout of {outer_s:g} s comes before the deadline of worlds, {deadline_s:g} s, which would name the "
            f"stuck rank: lower --world-deadline, or raise --timeout",
            pytest.PytestConfigWarning,
            stacklevel=1,
        )


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of the size that the marker `worlds` gives, once for each; 2 ranks without one."""
    return worlds(getattr(request, "param", 2))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each size of its marker."""
    marker = metafunc.definition.get_closest_marker("worlds")
    if marker is not None:
        _marked_deadline(marker)
    if "world" in metafunc.fixturenames:
        sizes = (marker.args if marker is not None else ()) or (2,)
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                pytest.fail(f"@pytest.mark.worlds({size!r}): expected numbers of ranks, 1 or more", pytrace=False)
        metafunc.parametrize("world", sizes, indirect=True, scope="session", ids=[f"{size}-ranks" for size in sizes])


def _marked_deadline(marker: pytest.Mark) -> float | None:
    unknown = set(marker.kwargs) - {"deadline"}
    if unknown:
        pytest.fail(f"@pytest.mark.worlds: unknown argument {sorted(unknown)[0]}: expected deadline", pytrace=False)
    if "deadline" not in marker.kwargs:
        return None
    try:
        return _seconds("@pytest.mark.worlds: deadline", marker.kwargs["deadline"])
    except pytest.UsageError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the test's deadline, and free its examples from Hypothesis's."""
    marker = item.get_closest_marker("worlds")
    marked = None if marker is None else _marked_deadline(marker)
    _set_deadline(item.config, item.config.stash[_default_s] if marked is None else marked)
    function = _given(item)
    if function is not None and _uses_worlds(item):
        from hypothesis import settings

        used = function._hypothesis_internal_use_settings
        function._hypothesis_internal_use_settings = settings(used, deadline=None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Reset worlds after each example, as after each test."""
    function = _given(item)
    if function is None:
        return (yield)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ and size > 1:
        raise pytest.UsageError(refusal(size))
    pool = item.config.stash.get(_pool, None)
    if pool is None or not _uses_worlds(item):
        return (yield)
    inner = function.hypothesis.inner_test
    function.hypothesis.inner_test = _resetting(inner, pool, item)
    try:
        return (yield)
    finally:
        function.hypothesis.inner_test = inner


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Leave no state of this test on the ranks."""
    try:
        return (yield)
    finally:
        pool = item.config.stash.get(_pool, None)
        if pool is not None:
            pool.reset()
        _set_deadline(item.config, item.config.stash[_default_s])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell what failing ranks have printed."""
    report = yield
    pool = item.config.stash.get(_pool, None)
    if pool is not None:
        reports.add_sections(item, call, report, pool)
    return report


def _resetting(inner: Callable[..., object], pool: WorldPool, item: pytest.Item) -> Callable[..., object]:
    @functools.wraps(inner)
    def example(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        try:
            return inner(*args, **kwargs)
        except Exception:
            reports.keep_of_example(item, pool)
            raise
        finally:
            pool.reset()

    return example


def _set_deadline(config: pytest.Config, seconds: float) -> None:
    config.stash[_deadline_s] = seconds
    pool = config.stash.get(_pool, None)
    if pool is not None:
        pool.deadline_s = seconds


def _given(item: pytest.Item) -> Any:
    """The item's function if `@given` wraps it, without its instance; else None."""
    function = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    return function if getattr(function, "is_hypothesis_test", False) else None


def _uses_worlds(item: pytest.Item) -> bool:
    return "worlds" in getattr(item, "fixturenames", ())
