"""Seeded faults that a proof as run must catch and name, beside those of a proof in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from meshwright.nn.dropout_add.eager import DropoutKey
from meshwright.nn.dropout_add.module import DropoutAdd
from meshwright.parallel import data_parallel, tensor_parallel
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.train import train_step as step_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove import seeded_faults
from tests.prove.data_faults import DATA_FAULTS
from tests.prove.forward_faults import number_local_tokens
from tests.prove.seeded_faults import Fault, OwnChunk, after_backward


class InBfloat16(OwnChunk):
    """A reduce-scatter that adds in bfloat16."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: object, async_op: bool = False
    ) -> None:
        rank, size, total = dist.get_rank(group), output_tensor.numel(), input_tensor.bfloat16()
        dist.all_reduce(total, group=group)
        output_tensor.copy_(total[rank * size : (rank + 1) * size])


def reduce_in_bfloat16(job: Job, step: TrainStep) -> None:
    for module in fsdp_modules(job.model):
        module.set_custom_reduce_scatter(InBfloat16())


def keep_weights_in_bfloat16(job: Job, step: TrainStep) -> None:
    """The optimizer's result is rounded, as if the masters were bfloat16."""
    real = job.optimizer.step

    def rounded(lr: float) -> None:
        real(lr)
        with torch.no_grad():
            for parameter in job.model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.copy_(local.bfloat16().float())

    job.optimizer.step = rounded  # type: ignore[method-assign]


def lose_feedback(job: Job, step: TrainStep) -> None:
    for part in job.features["compression"]._parts.values():
        part.commit = part.discard  # type: ignore[method-assign]


def drop_other_elements_on_rank_1(job: Job, step: TrainStep) -> None:
    """Each tensor-parallel rank seeds its generator by its rank."""
    for module in job.model.modules():
        if isinstance(module, DropoutAdd) and job.context.rank == 1:
            module.key = DropoutKey(job.config.train.seed + 1, module.key.site)


def skip_sum_over_tp(job: Job, step: TrainStep) -> None:
    """FSDP2 takes the local part of the partial gradients of norms."""
    real = FSDPParam._get_grad_inner_tensor
    FSDPParam._get_grad_inner_tensor = lambda self, grad: (  # type: ignore[method-assign]
        grad._local_tensor if grad.dim() == 1 else real(self, grad)
    )


def skip_clipping(job: Job, step: TrainStep) -> None:
    step_module.scale_gradients = lambda parameters, factor: None


def no_weight_decay(job: Job, step: TrainStep) -> None:
    for group in job.optimizer.groups:
        group.settings = replace(group.settings, weight_decay=0.0)


def lose_moments(job: Job, step: TrainStep) -> None:
    """The optimizer's state is created anew in every step."""
    real = job.optimizer.step

    def forgetful(lr: float) -> None:
        for state in job.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        real(lr)

    job.optimizer.step = forgetful  # type: ignore[method-assign]


def reduce_by_policy() -> None:
    """FSDP2's policy asks for a reduction in the compute dtype."""
    real = data_parallel.MixedPrecisionPolicy
    data_parallel.MixedPrecisionPolicy = lambda **fields: real(**{**fields, "reduce_dtype": fields["param_dtype"]})  # type: ignore[misc, assignment]


def compile_with_pending_embeddings() -> None:
    """Compiled blocks take the pending output of a sharded embedding, which loses its gradient."""
    tensor_parallel.wait_for_embeddings = lambda module, plan, stage: None


def as_named(name: str, *layout: str, says: tuple[str, ...] = ()) -> Fault:
    """A fault of a proof in float64, on another layout or in other words."""
    fault = seeded_faults.FAULTS[name]
    return replace(fault, layout=layout or fault.layout, says=says or fault.says)


SHARD2, TENSOR2, STREAM2 = ("mesh.dp_shard=2",), ("mesh.tp=2",), ("mesh.tp=2", "mesh.sequence_parallel=false")
DROPOUT = "train.dropout=0.25"
PENDING = "a compiled block takes a pending embedding"

POLICY = "FSDP2's policy reduces in bfloat16"
BEFORE = {PENDING: compile_with_pending_embeddings, POLICY: reduce_by_policy}
"""Faults that damage the trainer before the job is built."""
FAULTS: dict[str, Fault] = {
    "gradients are reduced in bfloat16": Fault(reduce_in_bfloat16, SHARD2,
        ("reduced or accumulated in bfloat16 where float32 was asked",), "norm.weight"),
    "the reduce-scatter, but not the all-reduce, is in bfloat16": Fault(reduce_in_bfloat16,
        ("mesh.dp_replicate=2", "mesh.dp_shard=2"),
        ("the sum over dp_shard is made in bfloat16 where float32 was asked",), "blocks.0.ffn.up.weight"),
    POLICY: Fault(lambda job, step: None, SHARD2, ("reduced or accumulated in bfloat16 where float32 was asked",)),
    "weights are kept in bfloat16": Fault(keep_weights_in_bfloat16, SHARD2, ("weights are kept in bfloat16",)),
    "error feedback is lost": Fault(lose_feedback, (*SHARD2, "comm.gradients=loco4"),
        ("the error feedback is missing",)),
    "tp ranks drop other elements": Fault(drop_other_elements_on_rank_1, (*STREAM2, DROPOUT),
        ("masks differ between tp ranks that should agree",)),
    "tokens are numbered by rank": Fault(number_local_tokens, (*TENSOR2, DROPOUT),
        ("rank 1 drops by the numbers of tokens of another tp rank",)),
    "the reduce-scatter over dp_shard is dropped": as_named("the reduce-scatter over dp_shard is dropped"),
    "the all-reduce over dp_replicate is dropped": as_named("the all-reduce over dp_replicate is dropped"),
    "the sum over tp is dropped": Fault(skip_sum_over_tp, TENSOR2, ("the sum over tp is missing",),
        "blocks.0.attention_norm.weight"),
    "gradients are twice the mean": as_named("gradients are twice the mean"),
    "one gradient is counted twice": Fault(after_backward(seeded_faults.double_one), SHARD2, ("2.000 × the reference",),
        "blocks.1.ffn.up.weight"),
    "a gradient is lost": as_named("a gradient is lost"),
    "micro-batch 0 runs in the place of 1": as_named("micro-batch 0 runs in the place of 1"),
    "a rank is given another rank's samples": as_named("a rank is given another rank's samples"),
    **{name: DATA_FAULTS[name] for name in ("another seed", "one token is damaged on one rank")},
    "the norm is not reduced": Fault(seeded_faults.keep_norm_local, SHARD2, ("norm is not that of the gradients",)),
    "clipping is skipped": Fault(skip_clipping, SHARD2, ("clipping is skipped",)),
    "the learning rate is doubled": as_named("the learning rate is doubled", says=("2 times the learning rate",)),
    "weight decay is missing": Fault(no_weight_decay, SHARD2, ("weight decay is missing",)),
    "norm weights decay": Fault(seeded_faults.decay_norms, SHARD2, ("norm weights don't decay",)),
    "moments are lost": Fault(lose_moments, SHARD2, ("moments of earlier steps are lost",)),
    "a parameter is not in the optimizer": as_named("a parameter is not in the optimizer",
        says=("never updated", "blocks.1.attention.wv.weight")),
    PENDING: Fault(lambda job, step: None, (*TENSOR2, "train.compile=true", "model.num_layers=1"),
        ("no gradient reached", "a compiled block may have lost it"), "embed.weight"),
    "rank 1 has another seed": as_named("rank 1 has another seed"),
    "rank 1 does not update": as_named("rank 1 does not update", says=("never updated", "only on rank 1")),
}  # fmt: skip
