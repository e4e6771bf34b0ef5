"""The invariants of a project's own conftest, for commands that run outside of pytest."""

from __future__ import annotations

from pathlib import Path

from invariants.errors import UsageError
from invariants.invariant import Invariant


def conftest_invariants(folder: Path) -> tuple[Invariant, ...]:
    """What `pytest folder` would find by `pytest_invariants_register`.

    Pytest reads its configuration and the first conftests, and collects nothing. `UsageError` where it cannot, or where
    something that is no invariant is registered; pytest has then written why to standard error.
    """
    import pytest

    reader = _Reader()
    # Options that a project adds want plugins that have nothing to do with this.
    # Hypothesis's would take all that follows for the loading of plugins, and warn of strategies that are used in it.
    arguments = ["--override-ini=addopts=", "-p", "no:hypothesispytest", str(folder)]
    status = pytest.main(arguments, plugins=["invariants.plugin", reader])
    if reader.problem is not None:
        raise reader.problem
    if status != 0:
        raise UsageError(f"pytest cannot load the conftest of {folder}, see above: correct it, or go elsewhere")
    return reader.found


class _Reader:
    """A plugin that takes the place of the run."""

    def __init__(self) -> None:
        self.found: tuple[Invariant, ...] = ()
        self.problem: UsageError | None = None

    def pytest_cmdline_main(self, config: object) -> int:
        import pytest

        from invariants.hookspecs import registered

        assert isinstance(config, pytest.Config)
        try:
            self.found = registered(config.hook.pytest_invariants_register, config)
        except UsageError as error:
            self.problem = error
        return 0
