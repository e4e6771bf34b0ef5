"""The built-in invariants, one file a promise."""

from invariants.catalog.schedule_activations import schedule_activations
from invariants.catalog.schedule_bubble import schedule_bubble
from invariants.catalog.schedule_deadlock_free import schedule_deadlock_free
from invariants.invariant import Invariant

BUILT_IN: tuple[Invariant, ...] = (schedule_bubble, schedule_activations, schedule_deadlock_free)
