"""The pytest side of a launch in all ranks but 0: no session and no report, but ranks for the controller's worlds."""

from __future__ import annotations

import signal
import sys

import pytest

from invariants.errors import InvariantsError
from invariants.world.launched.controller import launch_of


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Serve, and end with the exit status of rank 0; 1 where rank 0 is lost."""
    launch = launch_of(config)
    if launch is None or launch.rank == 0:
        return None
    from invariants.world.launched.agent import serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller; it ends this one
    try:
        status = serve(launch)
    except InvariantsError as error:
        raise pytest.UsageError(str(error)) from None
    if status is None:
        sys.stderr.write(f"rank {launch.rank}: rank 0, the way to it or this process's launcher is lost\n")
        return 1
    return status
