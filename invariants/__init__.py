"""Checks the invariants of distributed training code."""
