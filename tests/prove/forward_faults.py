"""Seeded faults of the forward: the proof must name the module, the ranks and what is wrong there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.attention.positions import RotaryEmbedding
from meshwright.prove.record.layout_run import Tamper
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import SHARD2, TENSOR2, Fault

ONE = ()
PIPE = ("mesh.pp=2", "train.num_microbatches=2")
CONTEXT = ("mesh.cp=2",)


def module_of(job: Job, name: str) -> nn.Module | None:
    """The module of that name, if a stage on this rank has it."""
    for part in job.parts().values():
        if name in dict(part.module.named_modules()):
            return part.module.get_submodule(name)
    return None


def on_module(name: str, change: Callable[[Any], None], *, rank: int | None = None) -> Tamper:
    def tamper(job: Job, step: TrainStep) -> None:
        module = module_of(job, name)
        if module is not None and rank in (None, job.context.rank):
            change(module)

    return tamper


def output(name: str, change: Callable[[Tensor], Tensor], *, rank: int | None = None) -> Tamper:
    """Change what a module returns, after tensor parallelism's hooks."""
    return on_module(name, lambda m: m.register_forward_hook(lambda _, args, out: change(out)), rank=rank)


def attention(change: Callable[..., tuple[Any, ...]], *, rank: int | None = None, layer: int = 0) -> Tamper:
    """Change queries, keys, values and mask before an attention core."""

    def wrap(module: Any) -> None:
        class Core:
            def __init__(self, real: Any) -> None:
                self.real = real

            def __getattr__(self, name: str) -> Any:
                return getattr(self.real, name)

            def __call__(self, *args: Any) -> Any:
                return self.real(*change(*args))

        module.core = Core(module.core)

    return on_module(f"blocks.{layer}.attention", wrap, rank=rank)


class OtherPositions(RotaryEmbedding):
    """Rotary tables of tokens that are counted wrongly."""

    def tables(self, layout: Any, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(layout, device=device, dtype=dtype)
        return cos.flip(-2), sin.flip(-2)


class NoRotation(RotaryEmbedding):
    def tables(self, layout: Any, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(layout, device=device, dtype=dtype)
        return torch.ones_like(cos), torch.zeros_like(sin)


def rotary(make: Callable[[RotaryEmbedding], RotaryEmbedding], *, rank: int | None = None) -> Tamper:
    def tamper(job: Job, step: TrainStep) -> None:
        for part in job.parts().values():
            if rank in (None, job.context.rank):
                part.module._rotary = make(part.module._rotary)

    return tamper


def epsilon(module: Any) -> None:
    module.eps = 1e-2


def layers_in_the_other_order(job: Job, step: TrainStep) -> None:
    [part] = job.parts().values()
    blocks = part.module.blocks
    first = blocks["0"]
    del blocks["0"]
    blocks["0"] = first


def gelu(module: Any) -> None:
    module.forward = lambda x: module.down(F.gelu(module.gate(x)) * module.up(x))


def no_activation(module: Any) -> None:
    module.forward = lambda x: module.down(module.gate(x) * module.up(x))


def replace_loss(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tamper:
    def tamper(job: Job, step: TrainStep) -> None:
        real = step._task.loss_sum
        step._task.loss_sum = lambda out, targets: real(*change(out, targets))  # type: ignore[method-assign]

    return tamper


def swap_halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), -1)


def token_of_zero(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, 1:]), 1)


# ---- dropout

DROPOUT = "train.dropout=0.25"


def number_local_tokens(job: Job, step: TrainStep) -> None:
    """Number tokens by their place on the rank, as a generator on each rank would."""
    step.pipeline.tokens._stream = (0, 2)


def same_mask_in_every_step(job: Job, step: TrainStep) -> None:
    """Number samples within the micro-batch."""
    task: Any = cast(Any, step._task)._task  # what the proof records is what the model reads
    batch = task.batch

    def renumbered(samples: range) -> Any:
        found = batch(samples)
        return replace(found, layout=replace(found.layout, samples=tuple(range(len(samples)))))

    task.batch = renumbered


def another_site(job: Job, step: TrainStep) -> None:
    """Give one block's first branch the number of the second."""
    block = next(m for m in job.model.modules() if hasattr(m, "ffn_add"))
    block.attention_add.key = block.ffn_add.key


FORWARD_FAULTS: dict[str, Fault] = {
    "the epsilon of a norm on one rank": Fault(on_module("norm", epsilon, rank=1), SHARD2,
        ("the output of norm, only on rank 1", "epsilon is 0.01")),
    "a norm in float32": Fault(output("blocks.1.ffn_norm", lambda x: x.float().double()), SHARD2,
        ("the output of blocks.1.ffn_norm, on every rank", "runs in float32, in blocks.1.ffn_norm: the difference is")),
    "a norm's gradient in float32": Fault(
        on_module("blocks.1.ffn_norm", lambda m: m.weight.register_hook(lambda gradient: gradient.float().double())),
        TENSOR2, ("not recognised", "the loss of step 1 is correct")),
    "layers in the other order": Fault(layers_in_the_other_order, SHARD2, ("blocks.1 runs before blocks.0",)),
    "no activation": Fault(on_module("blocks.1.ffn", no_activation), ONE, ("the input of blocks.1.ffn.down",)),
    "a branch is scaled": Fault(
        on_module("blocks.0.ffn_add", lambda module: setattr(module, "forward", lambda y, x, rows: x + 0.5 * y)),
        SHARD2, ("the output of blocks.0.ffn_add",)),
    "a block does nothing": Fault(on_module("blocks.1", lambda module: setattr(module, "forward", lambda x, tokens: x)),
        SHARD2, ("the module does nothing", "blocks.1")),
    "attention without its scale": Fault(attention(lambda q, k, v, mask: (q * 2.0, k, v, mask)), SHARD2,
        ("the output of blocks.0.attention.core", "the fault is in it")),
    "RoPE is not applied": Fault(rotary(lambda one: NoRotation(one.head_dim, one.theta, one.scaling)), SHARD2,
        ("the queries of blocks.0.attention.core", "RoPE is not applied")),
    "RoPE has another base": Fault(rotary(lambda one: replace(one, theta=500.0)), SHARD2,
        ("the queries of blocks.0.attention.core", "RoPE has another base")),
    "RoPE counts backwards on one rank": Fault(
        rotary(lambda one: OtherPositions(one.head_dim, one.theta, one.scaling), rank=1), SHARD2,
        ("the queries of blocks.0.attention.core, only on rank 1", "RoPE uses other positions")),
    "heads of queries in the other order": Fault(
        output("blocks.0.attention.wq", lambda x: x.unflatten(-1, (-1, 8)).flip(-2).flatten(-2)), SHARD2,
        ("the output of blocks.0.attention.wq", "features are exchanged")),
    "heads of a tp rank exchanged": Fault(output("blocks.1.attention.wv", swap_halves, rank=1), TENSOR2,
        ("blocks.1.attention.wv", "only on rank 1")),
    "a position is zero": Fault(output("blocks.0.ffn", token_of_zero), SHARD2,
        ("the output of blocks.0.ffn", "at positions 0 of 16")),
    "tokens are shifted": Fault(output("embed", lambda x: x.roll(1, 1)), SHARD2,
        ("the output of embed", "the value of the token 1 earlier")),
    "samples of a micro-batch exchanged": Fault(output("blocks.0", lambda x: x.flip(0), rank=0), SHARD2,
        ("the output of blocks.0", "only on rank 0", "rows")),
    "a bias that is not there": Fault(output("blocks.0.attention.wo", lambda x: x + 0.1), SHARD2,
        ("blocks.0.attention.wo", "a bias")),
    "NaN in one feature": Fault(
        output("blocks.1.ffn.up", lambda x: x.index_fill(-1, torch.tensor([3]), float("inf")), rank=1), SHARD2,
        ("not finite",)),
    "logits are scaled": Fault(output("head", lambda x: x * 0.5), SHARD2,
        ("the output of head", "0.500 × the right one")),
    "label smoothing": Fault(replace_loss(lambda out, targets: (out * 0.9, targets)), SHARD2,
        ("no value of the forward differs", "loss")),
    "features dropped on one stage": Fault(
        output("blocks.1.ffn.down", lambda x: x.index_fill(-1, torch.tensor([0, 1, 2, 3]), 0.0)), PIPE,
        ("the output of blocks.1.ffn.down", "in features 0…3 of 32")),
    "a cp rank's values are scaled": Fault(output("blocks.1.attention.wv", lambda x: x * 3.0, rank=1), CONTEXT,
        ("the output of blocks.1.attention.wv, only on rank 1", "3.000 × the right one")),
}  # fmt: skip
DROPOUT_FAULTS: dict[str, Fault] = {
    "tokens numbered by rank": Fault(number_local_tokens, (*TENSOR2, DROPOUT), ()),
    "samples numbered by micro-batch": Fault(same_mask_in_every_step, (*SHARD2, DROPOUT), ()),
    "a site used twice": Fault(another_site, (*SHARD2, DROPOUT), ()),
}
