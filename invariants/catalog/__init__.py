"""The built-in invariants, one file a promise."""

from invariants.catalog.buffers_stable import buffers_stable
from invariants.catalog.checkpoint_identical import checkpoint_identical
from invariants.catalog.checkpoint_resume import checkpoint_resume
from invariants.catalog.collectives_agree import collectives_agree
from invariants.catalog.gradients_reference import gradients_reference
from invariants.catalog.loss_finite import loss_finite
from invariants.catalog.optimizer_sharded import optimizer_sharded
from invariants.catalog.p2p_paired import p2p_paired
from invariants.catalog.p2p_portable import p2p_portable
from invariants.catalog.parameters_reference import parameters_reference
from invariants.catalog.replicas_agree import replicas_agree
from invariants.catalog.schedule_activations import schedule_activations
from invariants.catalog.schedule_balanced import schedule_balanced
from invariants.catalog.schedule_bubble import schedule_bubble
from invariants.catalog.schedule_complete import schedule_complete
from invariants.catalog.schedule_deadlock_free import schedule_deadlock_free
from invariants.catalog.schedule_ordered import schedule_ordered
from invariants.catalog.traffic_volume import traffic_volume
from invariants.invariant import Invariant

BUILT_IN: tuple[Invariant, ...] = (
    schedule_complete,
    schedule_ordered,
    schedule_bubble,
    schedule_activations,
    schedule_deadlock_free,
    schedule_balanced,
    collectives_agree,
    p2p_paired,
    buffers_stable,
    p2p_portable,
    traffic_volume,
    loss_finite,
    replicas_agree,
    gradients_reference,
    parameters_reference,
    optimizer_sharded,
    checkpoint_identical,
    checkpoint_resume,
)
