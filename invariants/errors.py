"""What can go wrong, by whose hand: a user's mistake, a target's refusal, a rank's failure."""

from __future__ import annotations


class InvariantsError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(InvariantsError):
    """A user's mistake; the one-line message names the thing, its value and what would be right."""


class Refused(InvariantsError):
    """Raised by a target's `build` when it declines a case, before any communication; the message is its reason."""


class WorldError(InvariantsError):
    """A world could not finish a call: a rank raised, died or overran its deadline."""
