"""Seeded faults that a proof as run must catch and name, beside those of a proof in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from meshwright.features.float8 import linear as float8_linear
from meshwright.mesh.local_shards import to_local
from meshwright.nn.dropout_add.eager import DropoutKey
from meshwright.nn.dropout_add.module import DropoutAdd
from meshwright.parallel import data_parallel, pipeline_shared_gradients, tensor_parallel
from meshwright.train import train_step
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove import seeded_faults
from tests.prove.data_faults import DATA_FAULTS
from tests.prove.forward_faults import PIPE, number_local_tokens, output
from tests.prove.optimizer_faults import OPTIMIZER_FAULTS
from tests.prove.seeded_faults import Fault, OwnChunk, Tamper, modules, on_rank, reducing, replacing


class InBfloat16(OwnChunk):
    """A reduce-scatter that adds in bfloat16."""

    def reduce(self, chunks: Tensor, group: Any) -> Tensor:
        total = chunks.bfloat16()
        dist.all_reduce(total, group=group)
        return total[dist.get_rank(group)]


def keep_weights_in_bfloat16(job: Job, step: TrainStep) -> None:
    """The optimizer's result is rounded, as if the masters were bfloat16."""
    real = job.optimizer.step

    @torch.no_grad()
    def rounded(lr: float) -> None:
        real(lr)
        for parameter in job.model.parameters():
            to_local(parameter).copy_(to_local(parameter).bfloat16().float())

    job.optimizer.step = rounded


def summed_in_bfloat16(job: Job, real: Any) -> Any:
    """An all-reduce of gradients in bfloat16."""

    def reduce(total: Tensor, *, group: Any = None) -> Tensor:
        low = total.bfloat16()
        real(low, group=group)
        return total.copy_(low)

    return reduce


def lose_feedback(job: Job, step: TrainStep) -> None:
    for part in job.features["compression"]._parts.values():
        part.commit = part.discard


def of_rounded(job: Job, real: Any) -> Any:
    """The norm of gradients that are rounded to bfloat16."""

    def norm(parameters: Any, **named: Any) -> Any:
        gradients = [to_local(p.grad) for p in parameters if p.grad is not None]
        kept = [gradient.clone() for gradient in gradients]
        for gradient in gradients:
            gradient.copy_(gradient.bfloat16())
        found = real(parameters, **named)
        for gradient, value in zip(gradients, kept, strict=True):
            gradient.copy_(value)
        return found

    return norm


def drop_other_elements(job: Job, step: TrainStep) -> None:
    """The tensor-parallel rank seeds its generator by its rank."""
    for module in modules(job, DropoutAdd):
        module.key = DropoutKey(job.config.train.seed + 1, module.key.site)


def local_norms(job: Job, real: Any) -> Any:
    """FSDP2 takes the local part of the partial gradients of norms."""
    return lambda self, grad: grad._local_tensor if grad.dim() == 1 else real(self, grad)


def reduce_by_policy() -> None:
    """FSDP2's policy asks for a reduction in the compute dtype."""
    real = data_parallel.MixedPrecisionPolicy
    data_parallel.MixedPrecisionPolicy = lambda **fields: real(**{**fields, "reduce_dtype": fields["param_dtype"]})


def compile_with_pending_embeddings() -> None:
    """Compiled blocks take the pending output of a sharded embedding, which loses its gradient."""
    tensor_parallel.wait_for_embeddings = lambda module, plan, stage: None


def in_float8(change: Callable[[Any], None]) -> Tamper:
    """Change the state of delayed scales, or each float8 layer if the change is of layers."""
    return lambda job, step: change(job.features["float8"]) if "float8" in job.features else None


def keep_magnitudes_local(float8: Any) -> None:
    """The magnitudes are not reduced."""
    float8.end_step = lambda *, applied: float8.history.advance()


def lose_history(float8: Any) -> None:
    float8.end_step = lambda *, applied: float8.history.discard()


def forget_all_but_the_last(float8: Any) -> None:
    real = float8.history.advance

    def advance() -> None:
        float8.history.history.zero_()
        real()

    float8.history.advance = advance


def keep_cached_weights(float8: Any) -> None:
    """Weights are cast before the first step only."""
    begins = iter([float8.begin])
    float8.begin = lambda: next(begins, lambda: None)()


def unrecorded_gradients(job: Job, step: TrainStep) -> None:
    """A layer's gradients leave no magnitude."""
    layer = next(iter(job.parts().values())).module.get_submodule("blocks.1.ffn.up")
    gradient = layer.slots.gradient
    layer.slots = layer.slots._replace(gradient=gradient._replace(amax=torch.zeros(())))


def casting(change: Callable[..., Any]) -> Tamper:
    """Replace the cast to float8."""
    return replacing(float8_linear, "cast", lambda job, real: partial(change, real))


def as_named(name: str, *layout: str, says: tuple[str, ...] = ()) -> Fault:
    """A fault of a proof in float64, on another layout or in other words."""
    fault = seeded_faults.FAULTS[name]
    return replace(fault, layout=layout or fault.layout, says=says or fault.says)


SHARD2, TENSOR2, STREAM2 = ("mesh.dp_shard=2",), ("mesh.tp=2",), ("mesh.tp=2", "mesh.sequence_parallel=false")
DROPOUT = "train.dropout=0.25"
CURRENT, DELAYED = "float8.recipe=current", "float8.recipe=delayed"
PENDING = "a compiled block takes a pending embedding"

POLICY = "FSDP2's policy reduces in bfloat16"
REPLACED = (tensor_parallel, data_parallel, FSDPParam, float8_linear)
BEFORE = {PENDING: compile_with_pending_embeddings, POLICY: reduce_by_policy}
"""Faults that damage the trainer before the job is built."""
FAULTS: dict[str, Fault] = {
    "gradients are reduced in bfloat16": Fault(reducing(InBfloat16), SHARD2,
        ("reduced or accumulated in bfloat16 where float32 was asked",), "norm.weight"),
    "the reduce-scatter, but not the all-reduce, is in bfloat16": Fault(reducing(InBfloat16), ("mesh.dp_replicate=2",
        "mesh.dp_shard=2"), ("the sum over dp_shard is made in bfloat16 where float32 was asked",),
        "blocks.0.ffn.up.weight"),
    POLICY: Fault(lambda job, step: None, SHARD2, ("reduced or accumulated in bfloat16 where float32 was asked",)),
    "copies of a tied embedding are summed in bfloat16": Fault(replacing(pipeline_shared_gradients, "all_reduce_sum",
        summed_in_bfloat16), (*PIPE, "model.tie_embeddings=true"), ("reduced or accumulated in bfloat16",),
        "embed.weight"),
    "activations of a float32 run are sent in bfloat16": Fault(output("blocks.0", lambda x: x.bfloat16().to(x.dtype)),
        (*PIPE, "train.precision=float32"), ("the output of blocks.0", "rounded to bfloat16")),
    "the norm is that of bfloat16 gradients": Fault(replacing(train_step, "local_squared_norm", of_rounded), (*SHARD2,
        "train.precision=float32"), ("the norm is that of gradients rounded to bfloat16",)),
    "weights are kept in bfloat16": Fault(keep_weights_in_bfloat16, SHARD2, ("weights are kept in bfloat16",)),
    "error feedback is lost": Fault(lose_feedback, (*SHARD2, "comm.gradients=loco4"), ("the error feedback is missing",
        )),
    "tp ranks drop other elements": Fault(on_rank(1, drop_other_elements), (*STREAM2, DROPOUT),
        ("masks differ between tp ranks that should agree",)),
    "tokens are numbered by rank": Fault(number_local_tokens, (*TENSOR2, DROPOUT),
        ("rank 1 drops by the numbers of tokens of another tp rank",)),
    "the reduce-scatter over dp_shard is dropped": as_named("the reduce-scatter over dp_shard is dropped"),
    "the all-reduce over dp_replicate is dropped": as_named("the all-reduce over dp_replicate is dropped"),
    "the sum over tp is dropped": Fault(replacing(FSDPParam, "_get_grad_inner_tensor", local_norms), TENSOR2,
        ("the sum over tp is missing",), "blocks.0.attention_norm.weight"),
    "gradients are twice the mean": as_named("gradients are twice the mean"),
    "one gradient is counted twice": as_named("one gradient is counted twice"),
    "a gradient is lost": as_named("a gradient is lost"),
    "micro-batch 0 runs in the place of 1": as_named("micro-batch 0 runs in the place of 1"),
    "a rank is given another rank's samples": as_named("a rank is given another rank's samples"),
    **{name: DATA_FAULTS[name] for name in ("another seed", "one token is damaged on one rank")},
    "the norm is not reduced": Fault(seeded_faults.keep_norm_local, SHARD2, ("report different norms",)),
    "clipping is skipped": OPTIMIZER_FAULTS["no clipping"],
    "the learning rate is doubled": as_named("the learning rate is doubled", says=("2.000 times the learning rate",)),
    "weight decay is missing": OPTIMIZER_FAULTS["decay is missing"],
    "norm weights decay": as_named("norm weights decay", says=("norms and biases decay too",)),
    "moments are lost": OPTIMIZER_FAULTS["the optimizer's state is cleared"],
    "a parameter is not in the optimizer": as_named("a parameter is not in the optimizer", says=("never updated",
        "blocks.1.attention.wv.weight")),
    PENDING: Fault(lambda job, step: None, (*TENSOR2, "train.compile=true", "model.num_layers=1"),
        ("no gradient reached", "a compiled block may have lost it"), "embed.weight"),
    "float8 scales are made from the rank's own magnitudes": Fault(in_float8(keep_magnitudes_local), (*SHARD2, DELAYED),
        ("are scaled by another magnitude", "the largest magnitudes are not reduced over dp_shard")),
    "they are not reduced over dp_replicate alone": Fault(in_float8(keep_magnitudes_local), ("mesh.dp_replicate=2",
        DELAYED), ("the largest magnitudes are not reduced over dp_replicate",)),
    "the history of float8 scales is lost": Fault(in_float8(lose_history), (*SHARD2, DELAYED),
        ("the largest magnitudes of earlier steps are lost",)),
    "float8 scales look back on one step": Fault(in_float8(forget_all_but_the_last), (*SHARD2, DELAYED),
        ("scales look back on 1 step, not 16",)),
    "a layer's gradients leave no magnitude": Fault(unrecorded_gradients, (*SHARD2, DELAYED),
        ("the largest magnitude of the gradients of blocks.1.ffn.up is 0", "not recorded")),
    "what is cast to float8 saturates": Fault(casting(lambda real, x, scale, dtype: real(x, 4 * scale, dtype)._replace(
        inverse=1 / (4 * scale))), (*SHARD2, CURRENT), ("not recognised", "right in float64")),
    "casts to float8 aren't scaled back": Fault(casting(lambda real, x, scale, dtype: real(x, scale, dtype)._replace(
        inverse=2 / scale)), (*SHARD2, CURRENT), ("the forward pass differs", "right in float64")),
    "cached float8 weights are those of the first step": Fault(in_float8(keep_cached_weights), ("mesh.dp_replicate=2",
        CURRENT, "float8.cache_weights=true", "train.lr=0.1"), ("step 2",)),
    "rank 1 has another seed": as_named("rank 1 has another seed"),
    "rank 1 does not update": as_named("rank 1 does not update", says=("never updated", "only on rank 1")),
}  # fmt: skip
