"""Planted faults and harmless variants of `impl`, by name.

Each fault names the public report that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping

from impl import miscommunicated, misplaced, plants, variants
from impl.conditions import (
    adaptive,
    all_of,
    always,
    misled_by,
    no_replicas,
    one_forward_one_backward,
    served_by,
    several_batches,
    several_microbatches,
    several_ranks,
    several_replicas,
    several_stages,
    single_precision,
    tied_over_stages,
    uneven,
)
from impl.crossed import CROSSED
from impl.planting import fault, harmless
from invariants.target import Fault

FAULTS: Mapping[str, Fault] = {
    # schedules
    "forward-computed-twice": fault(
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/pipelining/schedules.py (accepts it)",
        always,
        {"schedule.lower": misplaced.forwarded_twice},
    ),
    "gradient-received-after-use": fault(
        "https://github.com/pytorch/pytorch/issues/132644 (receives that are posted and not awaited)",
        several_stages,
        {"schedule.lower": misplaced.received_after_use, "pipeline.Execution.backward": plants.zero_where_not_received},
    ),
    "split-by-parameters": fault(
        "https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/pipe/module.py (its default method)",
        misled_by(misplaced.parameter_counts),
        {"config.estimated_costs": lambda _costs: misplaced.parameter_counts},
    ),
    "microbatches-serialised": fault(
        "https://github.com/pytorch/pytorch/pull/130752 (warm-up rule leaves bubbles)",
        all_of(several_stages, several_microbatches),
        {"schedule.generate": misplaced.serialised},
    ),
    "1f1b-runs-gpipe": fault(
        "https://github.com/pytorch/pytorch/issues/128910 (1F1B's memory grows with the number of microbatches)",
        all_of(one_forward_one_backward, several_microbatches),
        {"schedule.generate": misplaced.gpipe_for_all},
    ),
    "graphs-kept-in-step": fault(
        "https://github.com/pytorch/pytorch/issues/128910 (graphs are kept alive to the end of the step)",
        all_of(one_forward_one_backward, several_microbatches),
        {"pipeline.Execution.backward": plants.retaining("execution")},
    ),
    "graphs-kept-over-steps": fault(
        "https://github.com/pytorch/pytorch/issues/128910 (returned outputs keep graphs alive)",
        always,
        {"pipeline.Execution.backward": plants.retaining("pipeline")},
    ),
    "send-before-receive": fault(
        "https://github.com/pytorch/pytorch/issues/172668 (both neighbours send and wait for each other)",
        all_of(one_forward_one_backward, several_stages, several_microbatches),
        {"schedule.LOWERING": variants.lowered("textbook")},
    ),
    # losses
    "nan-on-last-rank": fault(
        "https://github.com/NVIDIA/Megatron-LM/pull/4047 (NaN, late and on some ranks)",
        always,
        {"trainer.Trainer.step": plants.nan_on_last_rank},
    ),
    "loss-is-zero": fault(
        "https://github.com/deepspeedai/DeepSpeed/issues/4661 (reports a loss of exactly 0)",
        always,
        {"trainer.Trainer.step": plants.zero_loss},
    ),
    "loss-is-placeholder": fault(
        "https://github.com/pytorch/torchtitan/issues/547 (only the last stage knows the loss, others print -1)",
        several_stages,
        {"trainer.Trainer.step": plants.placeholder},
    ),
    # replicas
    "shards-not-gathered": fault(
        "https://github.com/lodestone-rock/RamTorch/issues/13 (broadcast of updated shards is skipped)",
        several_replicas,
        {"zero1.FlatGroup.gather": plants.nothing},
    ),
    "no-first-broadcast": fault(
        "https://github.com/RLinf/RLinf/issues/1378 (a failed broadcast is swallowed; ranks keep their own values)",
        several_replicas,
        {"ddp.broadcast": plants.nothing, "trainer.Trainer.__init__": plants.seed_of_replica},
    ),
    "tied-gradient-not-summed": fault(
        "https://github.com/NVIDIA/Megatron-LM/issues/656 (head and embedding become different)",
        tied_over_stages,
        {"trainer.Trainer._sum_tied": plants.nothing},
    ),
    "tied-gradient-summed-late": fault(
        "https://github.com/NVIDIA/Megatron-LM/issues/844 (summed after the shards were scattered)",
        all_of(tied_over_stages, several_replicas),
        {"trainer.Trainer._sum_tied": plants.nothing, "zero1.Zero1.reduce": plants.tied_sum_after_shards},
    ),
    # gradients
    "divided-by-microbatches-again": fault(
        "https://github.com/areal-project/AReaL/pull/1273 (divides what is normalised already)",
        several_microbatches,
        {"pipeline.Pipeline.run": plants.divided_again},
    ),
    "rescaled-after-each-batch": fault(
        "https://github.com/pytorch/torchtitan/issues/1733 (older batches of a window are divided again)",
        all_of(several_batches, several_microbatches),
        {"pipeline.Pipeline.run": plants.rescaled_after_each_batch},
    ),
    "mean-of-replica-means": fault(
        "https://github.com/huggingface/transformers/issues/34242 (no global token mean)",
        all_of(several_replicas, uneven),
        {"pipeline.Pipeline.run": plants.mean_of_replica_means},
    ),
    "mean-of-microbatch-means": fault(
        "https://github.com/huggingface/transformers/pull/34191 (mean of means under accumulation)",
        all_of(several_microbatches, uneven),
        {"pipeline.Execution.forward": plants.mean_of_microbatch_means},
    ),
    "first-mask-for-all": fault(
        "https://github.com/pytorch/torchtitan/issues/1723 (one mask for every microbatch)",
        all_of(several_microbatches, uneven),
        {"pipeline.Pipeline.run": plants.first_mask_for_all},
    ),
    "only-last-batch": fault(
        "https://github.com/allenai/open-instruct/pull/1498 (the accumulator is reset at every batch)",
        several_batches,
        {"pipeline.Pipeline.run": plants.only_last_batch},
    ),
    "only-last-microbatch": fault(
        "https://github.com/NVIDIA-NeMo/Automodel/pull/3530 (accumulated gradients are cleared)",
        several_microbatches,
        {"pipeline.Execution.backward": plants.only_last_microbatch},
    ),
    "gradients-not-cleared": fault(
        "https://github.com/NVIDIA/Megatron-LM/pull/4609 (gradient buffer is not zeroed)",
        always,
        {"zero1.Zero1.clear": plants.nothing},
    ),
    "gradients-not-reduced": fault(
        "https://github.com/ByteDance-Seed/VeOmni/pull/1115 (every rank keeps its own gradient)",
        several_replicas,
        {"zero1.FlatGroup.reduce": plants.own_gradient_only},
    ),
    # communication
    "all-reduce-then-slice": fault(
        "https://github.com/karpathy/llm.c/pull/421 (all-reduces gradients of which a rank needs one shard)",
        several_replicas,
        {"zero1.FlatGroup.reduce": miscommunicated.all_reduce},
    ),
    "reduced-at-every-microbatch": fault(
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2370 (no `no_sync`: a reduction for each microbatch)",
        all_of(several_replicas, several_microbatches),
        {
            "trainer.Trainer.__init__": miscommunicated.reduced_at_every_microbatch,
            "pipeline.Execution.backward": miscommunicated.then_reduced,
        },
    ),
    "sent-in-double": fault(
        "https://github.com/EleutherAI/gpt-neox/pull/330 (messages go in a wider dtype than what they carry)",
        all_of(several_stages, single_precision),
        {"pipeline.Execution.communicate": miscommunicated.in_double},
    ),
    "pairs-posted-one-by-one": fault(
        "https://github.com/NVIDIA/nccl/issues/479 (both send, then receive: stuck unless posted as one)",
        all_of(one_forward_one_backward, several_stages, several_microbatches),
        {"schedule.LOWERING": variants.lowered("batched"), "pipeline.Execution.together": miscommunicated.one_by_one},
    ),
    # updates and shards
    "shards-written-to-wrong-place": fault(
        "https://github.com/deepspeedai/DeepSpeed/pull/2058 (wrong partition when copying back)",
        several_replicas,
        {"zero1.FlatGroup.gather": plants.shifted_shards},
    ),
    "optimizer-holds-copies": fault(
        "https://github.com/huggingface/accelerate/issues/3256 (updates other tensors than the model's)",
        always,
        {"zero1.FlatGroup.update": plants.update_of_copies},
    ),
    "rate-times-replicas": fault(
        "https://github.com/huggingface/accelerate/issues/2926 (learning rate depends on the number of processes)",
        several_replicas,
        {"zero1.Zero1.__init__": plants.rate_times_replicas},
    ),
    "shard-of-global-rank": fault(
        "https://github.com/pytorch/xla/pull/5936 (shard index is computed from the global rank)",
        all_of(several_stages, several_replicas),
        {"zero1.FlatGroup.__init__": plants.index_of_global_rank},
    ),
    "state-not-sharded": fault(
        "https://github.com/facebookresearch/fairscale/issues/115 (state is sharded over a wrong group)",
        all_of(several_replicas, adaptive),
        {"zero1.FlatGroup.__init__": plants.shard_group_of_one, "zero1.FlatGroup.reduce": miscommunicated.all_reduce},
    ),
    # checkpoints
    "random-state-not-restored": fault(
        "https://github.com/vllm-project/speculators/issues/1027 (RNG is not part of the checkpoint)",
        always,
        {"trainer._set_random_state": plants.nothing},
    ),
    "random-state-of-rank-0": fault(
        "https://github.com/NVIDIA/Megatron-LM/pull/6858 (all ranks restore one RNG state)",
        several_ranks,
        {"checkpoint._read": plants.from_rank_0("rng.")},
    ),
    "moments-not-restored": fault(
        "https://github.com/pytorch/pytorch/issues/126881 (keys without a place in memory are ignored)",
        adaptive,
        {"trainer.Trainer.load": plants.zeroed("exp_avg", "exp_avg_sq")},
    ),
    "step-counter-not-restored": fault(
        "https://github.com/pytorch/pytorch/issues/125528 (values that are no weights are not restored)",
        adaptive,
        {"trainer.Trainer.load": plants.zeroed("step")},
    ),
    "steps-done-not-restored": fault(
        "https://github.com/pytorch/pytorch/issues/125528 (step counts from 0 after a load)",
        always,
        {"trainer.Trainer.load": plants.forgets_steps},
    ),
    "shard-of-replica-0": fault(
        "https://github.com/pytorch/pytorch/issues/120356 (tensors of one name are taken for copies)",
        several_replicas,
        {"checkpoint._read": plants.shard_of_replica_0},
    ),
    # harmless
    "costs-in-other-units": harmless(
        "a split depends on ratios alone", several_stages, {"config.estimated_costs": variants.in_other_units}
    ),
    "sum-in-reverse-order": harmless(
        "addition in another order is as exact",
        several_replicas,
        {"zero1.FlatGroup.reduce": variants.reversed_sum},
    ),
    "parameters-in-reverse-order": harmless(
        "a flat buffer may hold its parameters in any order",
        always,
        {"zero1.Zero1.__init__": variants.reversed_parameters},
    ),
    "barrier-before-reduction": harmless("costs time only", always, {"zero1.Zero1.reduce": variants.after_barrier}),
    "looped-optimizer": harmless("the same update, not fused", always, {"zero1.Rule.optimizer": variants.looped}),
    "blocking-sends": harmless(
        "the order is free of deadlock when a send waits for its receive",
        several_stages,
        {"pipeline.Execution.send": variants.blocking},
    ),
    "exchanges-in-pairs": harmless(
        "a send and a receive that are posted together cannot wait for each other",
        several_stages,
        {"schedule.LOWERING": variants.lowered("batched")},
    ),
    "even-ranks-send-first": harmless(
        "neighbours do not both wait",
        all_of(several_stages, no_replicas),
        {"schedule.LOWERING": variants.lowered("even-first")},
    ),
    "loss-summed-in-rank-order": harmless(
        "another way to the same sum", always, {"grid.Grid.sum": variants.sum_of_gathered}
    ),
    "last-rank-writes-first": harmless(
        "the manifest alone commits", several_ranks, {"grid.Grid.together": variants.last_rank_first}
    ),
    "stages-by-number-of-layers": harmless(
        "any split trains alike; this one is as balanced",
        served_by(variants.counts),
        {"config.estimated_costs": lambda _costs: variants.counts},
    ),
    **CROSSED,
}
"""By name: what is wrong, or harmless."""
