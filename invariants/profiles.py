"""Hypothesis profiles, registered whenever Hypothesis is imported (entry point group `hypothesis`), loaded on demand.

Hypothesis has a profile `ci` of its own, so ours carry a prefix. `derandomize` and a database exclude each other.
"""

from __future__ import annotations

import sys

SUITE_CASES = {"invariants-ci": 40, "invariants-dev": 12, "invariants-deep": 5000}
"""Cases of a suite that asks for no number, under each profile."""
OTHER_CASES = 25
"""The same under any other profile."""
RANDOM = frozenset({"invariants-dev", "invariants-deep"})
"""Profiles under which a suite that gives no seed draws other cases in each session."""


def register() -> None:
    """Make the profiles known to Hypothesis."""
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile(
        "invariants-ci",
        settings(
            derandomize=True, database=None, print_blob=True, deadline=None, max_examples=50, suppress_health_check=slow
        ),
    )
    settings.register_profile(
        "invariants-dev", settings(deadline=None, max_examples=20, print_blob=True, suppress_health_check=slow)
    )
    settings.register_profile(
        "invariants-deep", settings(deadline=None, max_examples=5000, print_blob=True, suppress_health_check=slow)
    )


def loaded() -> str:
    """Name of the profile in use; `default` where nothing has imported Hypothesis, and so loaded one."""
    hypothesis = sys.modules.get("hypothesis")
    return "default" if hypothesis is None else str(hypothesis.settings.get_current_profile_name())
