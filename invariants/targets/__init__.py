"""Targets for libraries that others wrote: one adapter each, by the name that `invariants check NAME` takes."""
