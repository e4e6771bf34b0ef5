"""Each planted fault of both targets is caught on real ranks, each harmless variant stays green.

The matrix of all invariants is `invariants faults`; here each fault runs on small worlds until it is caught.
"""

from functools import cache

import pytest

from impl.target import target as impl_target
from invariants.campaign import plan
from invariants.catalog import BUILT_IN
from invariants.matrix import matrix
from invariants.runner import Runner
from invariants.targets.torch_native import target as torch_target

TARGETS = {"impl": impl_target, "torch": torch_target}
FAULTS = [(name, fault) for name, target in TARGETS.items() for fault in target.faults()]

STANDS_FOR = {
    "schedule.complete": ("impl", "forward-computed-twice"),
    "schedule.ordered": ("impl", "gradient-received-after-use"),
    "schedule.balanced": ("impl", "split-by-parameters"),
    "schedule.bubble": ("impl", "microbatches-serialised"),
    "schedule.activations": ("impl", "graphs-kept-over-steps"),
    "schedule.deadlock-free": ("impl", "send-before-receive"),
    "collectives.agree": ("impl", "metrics-in-another-order"),
    "p2p.paired": ("impl", "received-into-integers"),
    "buffers.stable": ("impl", "send-buffer-overwritten"),
    "p2p.portable": ("impl", "pairs-posted-one-by-one"),
    "traffic.volume": ("impl", "reduced-at-every-microbatch"),
    "loss.finite": ("impl", "nan-on-last-rank"),
    "replicas.agree": ("torch", "stale-shards"),
    "gradients.reference": ("impl", "divided-by-microbatches-again"),
    "parameters.reference": ("impl", "optimizer-holds-copies"),
    "optimizer.sharded": ("impl", "state-not-sharded"),
    "checkpoint.identical": ("impl", "random-state-of-rank-0"),
    "checkpoint.resume": ("torch", "moments-lost"),
}
"""A fault that each invariant must see itself, whoever else does."""


HEALTHY = {}


@cache
def planned(name):
    return plan(TARGETS[name], 300, seed=0)


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[f"{name}-{fault}" for name, fault in FAULTS])
def test_a_fault_is_caught_and_a_variant_is_not(worlds, tmp_path, name, fault):
    target = TARGETS[name]
    planted = target.faults()[fault]
    applicable = [case for case in planned(name) if planted.applies(case)]
    smallest = min(case.topology.world_size for case in applicable)
    cases = [case for case in applicable if case.topology.world_size == smallest]
    runner = Runner(worlds.pool, target, tmp_path)

    def run(case, fault):
        if fault is not None:
            return runner(case, fault)
        # Many faults are tried on one case; what it gives without any is the same each time.
        if (name, case) not in HEALTHY:
            HEALTHY[name, case] = runner(case)
        return HEALTHY[name, case]

    (row,) = matrix({fault: planted}, cases, BUILT_IN, run, tries=4, variants=1)
    assert row.passed, (row.outcome, str(row.telling), [str(v) for v in row.violated.values()], dict(row.unknown))
    must_see = {invariant for invariant, stand in STANDS_FOR.items() if stand == (name, fault)}
    assert must_see <= set(row.violated), str(row.telling)


def test_each_invariant_has_a_fault_that_stands_for_it():
    assert set(STANDS_FOR) == {invariant.id for invariant in BUILT_IN}
    assert set(STANDS_FOR.values()) <= set(FAULTS)
