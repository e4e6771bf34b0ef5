"""The pytest side of a launch in rank 0: it runs the tests, and ends the other processes with its own exit status."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from invariants.errors import InvariantsError
from invariants.world.launched.launch import Hidden, Launch

if TYPE_CHECKING:
    from invariants.world.launched.fleet import Fleet

_fleet = pytest.StashKey["Fleet"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.getgroup("invariants").addoption(
        "--launcher",
        choices=("auto", "none"),
        default="auto",
        help="auto: under torchrun, srun or mpirun, rank 0 runs the tests, on worlds of the launched processes; "
        "none: each launched process runs them for itself (default: auto)",
    )


def launch_of(config: pytest.Config) -> Launch | None:
    """The launch that this process is one of, or None."""
    if config.getoption("launcher") == "none":
        return None
    try:
        return Launch.read(os.environ)
    except InvariantsError as error:
        raise pytest.UsageError(str(error)) from None


def fleet_of(config: pytest.Config) -> Fleet | None:
    """The launched processes, in the controller of a launch; elsewhere None."""
    return config.stash.get(_fleet, None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Open the session to the other processes, and end them with it, whatever it comes to."""
    launch = launch_of(config)
    if launch is None or launch.rank > 0:
        return (yield)
    from invariants.world.launched.fleet import Fleet

    try:
        fleet = config.stash[_fleet] = Fleet(launch)
    except InvariantsError as error:
        raise pytest.UsageError(str(error)) from None
    hidden = Hidden()
    before = signal.signal(signal.SIGTERM, lambda *_: _terminated(fleet))
    status: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        if getattr(config.option, "tx", None) or getattr(config.option, "numprocesses", None):
            raise pytest.UsageError(
                f"workers of xdist under {launch.launcher}: rank 0 runs the tests; drop -n and --tx"
            )
        status = yield
    except pytest.UsageError:
        status = pytest.ExitCode.USAGE_ERROR
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends, and in bounded time
        hidden.restore()
        status = fleet.end(int(status))
        signal.signal(signal.SIGTERM, before)
    return status


def _terminated(fleet: Fleet) -> None:
    """A launcher that has lost one process of a machine ends the others: there is time for a report before it kills."""
    if not fleet.lost:  # else a call on a world is about to fail, and the session with it
        raise KeyboardInterrupt("the launcher has ended this process (SIGTERM)")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Be interrupted by the launcher while tests run, but not while their report is written."""
    if fleet_of(session.config) is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Let no test follow the loss of a launched process."""
    try:
        return (yield)
    finally:
        fleet = fleet_of(item.config)
        if fleet is not None and fleet.look():
            item.session.shouldfail = "a launched process is lost"


def pytest_report_header(config: pytest.Config) -> str | None:
    """Tell who drives."""
    fleet = fleet_of(config)
    if fleet is None:
        return None
    return f"invariants: {fleet.launch.size} processes of {fleet.launch.launcher}; rank 0 runs the tests"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the launched processes that are lost."""
    fleet = fleet_of(terminalreporter.config)
    if fleet is not None and (lost := fleet.look()):
        terminalreporter.section("launched processes")
        for line in lost:
            terminalreporter.line(line)
