"""The pytest plugin. Loading it imports neither torch nor hypothesis."""

from __future__ import annotations

# None before those that it imports: pytest could not rewrite the assertions of these any more.
pytest_plugins = (
    "invariants.world.launched.controller",
    "invariants.world.launched.serving",
    "invariants.world.fixtures",
    "invariants.suite_plugin",
)
