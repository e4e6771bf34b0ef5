"""The target `torch`: pipelining, DDP, `ZeroRedundancyOptimizer` and `torch.distributed.checkpoint` as they ship.

Importing this module imports no torch: the controller reads `target` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from invariants.errors import UsageError
from invariants.target import Promises
from invariants.traffic import Traffic

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from invariants.case import Case
    from invariants.target import Fault, Trainer
    from invariants.world.context import RankContext

_SCHEDULES = ("gpipe", "1f1b")


class TorchTarget:
    """`ScheduleGPipe` and `Schedule1F1B`, DDP, ZeRO over Adam and DCP, put together as their documentation says.

    Optimizer state is whole on the rank that `ZeroRedundancyOptimizer` assigns a parameter to. A resumed run agrees
    within the tolerance: DDP rebuilds its buckets after the first backward, and with them the order of additions. DDP
    sums all gradients on all replicas, after each batch of a window, and ZeRO then broadcasts what each rank updated.
    """

    name = "torch"
    preload = ("invariants.targets.torch_trainer",)
    promises = Promises(
        layout="whole-parameter",
        resume="tolerance",
        traffic=Traffic(gradients="all-reduce", parameters="gathered", summed="batch"),
    )

    def cases(self) -> SearchStrategy[Case]:
        """Both schedules, untied heads; shapes given to `PipelineStage`, or, in one case of four, left to it."""
        from hypothesis import strategies as st

        from invariants.strategies import cases

        options = st.sampled_from([(), (), (), (("shapes", "inferred"),)])
        return st.builds(replace, cases(schedules=_SCHEDULES, ties=(False,)), options=options)

    def known(self) -> Path:
        """What is known of torch 2.13."""
        return Path(__file__).with_name("torch_known.toml")

    def build(self, case: Case, rank: RankContext) -> Trainer:
        """Refuses what torch refuses, in its words; a case outside the domain is a `UsageError`."""
        if case.schedule not in _SCHEDULES:
            raise UsageError(f"case: schedule={case.schedule!r}: target torch knows {', '.join(_SCHEDULES)}")
        if case.model.tied:
            raise UsageError("case: tied=yes: target torch has untied heads only, use tied=no")
        from invariants.targets.torch_trainer import PipelineTrainer

        return PipelineTrainer(case, rank)

    def reference(self, case: Case, rank: RankContext) -> Trainer:
        """Plain autograd and `torch.optim` on the whole model."""
        from invariants.targets.torch_trainer import PlainTrainer

        return PlainTrainer(case, rank)

    def faults(self) -> Mapping[str, Fault]:
        """Wrong lines around torch's parts, and variants that change nothing that matters."""
        from invariants.targets.torch_faults import FAULTS

        return FAULTS


target = TorchTarget()
