"""An invariant for pytest-invariants."""
