"""Hypothesis profiles, registered whenever Hypothesis is imported (entry point group `hypothesis`), loaded on demand.

Hypothesis has a profile `ci` of its own, so ours carry a prefix. `derandomize` and a database exclude each other.
"""

from __future__ import annotations


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
