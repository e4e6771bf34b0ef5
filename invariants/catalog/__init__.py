"""The built-in invariants, one file a promise."""

from invariants.catalog.gradients_reference import gradients_reference
from invariants.catalog.parameters_reference import parameters_reference
from invariants.catalog.replicas_agree import replicas_agree
from invariants.catalog.schedule_activations import schedule_activations
from invariants.catalog.schedule_bubble import schedule_bubble
from invariants.catalog.schedule_deadlock_free import schedule_deadlock_free
from invariants.invariant import Invariant

BUILT_IN: tuple[Invariant, ...] = (
    schedule_bubble,
    schedule_activations,
    schedule_deadlock_free,
    replicas_agree,
    gradients_reference,
    parameters_reference,
)
