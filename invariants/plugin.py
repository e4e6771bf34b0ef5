"""The pytest plugin. Loading it imports neither torch nor hypothesis."""

from __future__ import annotations

pytest_plugins = (
    "invariants.world.fixtures",
    "invariants.world.launched.controller",
    "invariants.world.launched.serving",
    "invariants.suite_plugin",
)
