"""Checks the invariants of distributed training code.

What an adapter, an invariant or a test imports. Importing it loads neither torch, nor hypothesis, nor pytest; the
strategies, which need hypothesis, are in `invariants.strategies`, the kit for authors in `invariants.conformance`.
"""

# `invariant` and `suite` also name the modules that define them; bound here, the names are the functions.
from invariants.case import Case, Model, OptimizerSpec, Save, Step, Topology
from invariants.errors import InvariantsError, Refused, UsageError, WorldError
from invariants.evidence import Evidence, Section
from invariants.invariant import Invariant, NotApplicable, Verdict, Violation, invariant
from invariants.suite import suite
from invariants.target import (
    MISSING,
    Closes,
    Counts,
    Fault,
    GlobalBatch,
    HasFaults,
    HasReference,
    Held,
    Kind,
    Moment,
    Pipelines,
    Promises,
    Saves,
    Splits,
    StepResult,
    Target,
    Trainer,
    Window,
)
from invariants.traffic import Traffic

__all__ = [
    "MISSING",
    "Case",
    "Closes",
    "Counts",
    "Evidence",
    "Fault",
    "GlobalBatch",
    "HasFaults",
    "HasReference",
    "Held",
    "Invariant",
    "InvariantsError",
    "Kind",
    "Model",
    "Moment",
    "NotApplicable",
    "OptimizerSpec",
    "Pipelines",
    "Promises",
    "Refused",
    "Save",
    "Saves",
    "Section",
    "Splits",
    "Step",
    "StepResult",
    "Target",
    "Topology",
    "Traffic",
    "Trainer",
    "UsageError",
    "Verdict",
    "Violation",
    "Window",
    "WorldError",
    "invariant",
    "suite",
]
