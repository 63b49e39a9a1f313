"""Seeded faults of the forward: the proof must name the module, the ranks and what is wrong there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from meshwright.nn.attention import attention_mask
from meshwright.nn.attention.attention import LocalAttention
from meshwright.nn.attention.positions import RotaryEmbedding, rope_tables
from tests.prove.seeded_faults import SHARD2, TENSOR2, Fault, giving, on_rank, replacing, taking, wrapping

ONE = ()
PIPE = ("mesh.pp=2", "train.num_microbatches=2")
CONTEXT = ("mesh.cp=2",)
DROPOUT = "train.dropout=0.25"
REPLACED = (attention_mask, LocalAttention)


def module_of(job, name):
    """The module of that name, if a stage on this rank has it."""
    parts = (dict(part.module.named_modules()) for part in job.parts().values())
    return next((found[name] for found in parts if name in found), None)


def on_module(name, change):
    return lambda job, step: change(found) if (found := module_of(job, name)) is not None else None


def running(name, forward):
    """Give a module another forward."""
    return on_module(name, lambda module: setattr(module, "forward", forward(module)))


def output(name, change):
    """Change what a module returns, after tensor parallelism's hooks."""
    return on_module(name, lambda module: module.register_forward_hook(lambda _, args, out: change(out)) and None)


def scores_times(factor, core):
    """Scale the scores of an attention core."""
    return replacing(core, "__call__", taking(lambda job, one, q, *others: (one, factor * q, *others)))


def rotary(make):
    """Give models another rotary embedding."""

    def tamper(job, step):
        for part in job.parts().values():
            part.module._rotary = make(part.module._rotary)

    return tamper


def positions(find):
    """Give RoPE other positions, found by the layout of tokens."""

    class Other(RotaryEmbedding):
        def tables(self, layout, *, device, dtype):
            return rope_tables(find(layout), self.head_dim, theta=self.theta, scaling=self.scaling, dtype=dtype)

    return rotary(lambda one: Other(one.head_dim, one.theta, one.scaling))


def layers_in_the_other_order(job, step):
    [part] = job.parts().values()
    part.module.blocks["0"] = part.module.blocks.pop("0")


def number_local_tokens(job, step):
    """Number tokens by their place on the rank, as a generator on each rank would."""
    step.pipeline.tokens._stream = (0, 2)


def renumbered(job, batch):
    """Number samples within the micro-batch, so that each step has the same mask."""
    return replace(batch, layout=replace(batch.layout, samples=tuple(range(len(batch.layout.samples)))))


def another_site(job, step):
    """Give one block's first branch the number of the second."""
    block = next(m for m in job.model.modules() if hasattr(m, "ffn_add"))
    block.attention_add.key = block.ffn_add.key


FORWARD_FAULTS: dict[str, Fault] = {
    "the epsilon of a norm on one rank": Fault(on_rank(1, on_module("norm", lambda m: setattr(m, "eps", 1e-2))), SHARD2,
        ("the output of norm, only on rank 1", "epsilon is 0.01")),
    "a norm in float32": Fault(output("blocks.1.ffn_norm", lambda x: x.float().double()), SHARD2,
        ("the output of blocks.1.ffn_norm, on every rank", "it is rounded to float32")),
    "a norm's gradient in float32": Fault(on_module("blocks.1.ffn_norm",
        lambda m: m.weight.register_hook(lambda gradient: gradient.float().double())), TENSOR2,
        ("no activation and no gradient of one differs in step 1",)),
    "layers in the other order": Fault(layers_in_the_other_order, SHARD2, ("blocks.1 runs before blocks.0",)),
    "no activation": Fault(running("blocks.1.ffn", lambda m: lambda x: m.down(m.gate(x) * m.up(x))), ONE,
        ("the input of blocks.1.ffn.down", "no activation instead of SiLU")),
    "a branch is scaled": Fault(running("blocks.0.ffn_add", lambda m: lambda y, x, rows: x + 0.5 * y), SHARD2,
        ("the output of blocks.0.ffn_add",)),
    "a block does nothing": Fault(running("blocks.1", lambda m: lambda x, tokens: x), SHARD2,
        ("the module does nothing", "blocks.1")),
    "attention without its scale": Fault(scores_times(2.0, LocalAttention), SHARD2,
        ("the output of blocks.0.attention.core", "the fault is in it")),
    "RoPE is not applied": Fault(positions(lambda layout: torch.zeros(layout.num_tokens)), SHARD2,
        ("the queries of blocks.0.attention.core", "RoPE is not applied")),
    "RoPE has another base": Fault(rotary(lambda one: replace(one, theta=500.0)), SHARD2,
        ("the queries of blocks.0.attention.core", "RoPE has another base")),
    "RoPE counts backwards on one rank": Fault(on_rank(1, positions(lambda layout: torch.arange(layout.num_tokens).flip(
        0))), SHARD2, ("the queries of blocks.0.attention.core, only on rank 1", "RoPE uses other positions")),
    "heads of queries in the other order": Fault(output("blocks.0.attention.wq", lambda x: x.unflatten(-1, (-1,
        8)).flip(-2).flatten(-2)), SHARD2, ("the output of blocks.0.attention.wq", "features are exchanged")),
    "heads of a tp rank exchanged": Fault(on_rank(1, output("blocks.1.attention.wv", lambda x: x.roll(x.shape[-1] // 2,
        -1))), TENSOR2, ("blocks.1.attention.wv", "only on rank 1")),
    "a position is zero": Fault(output("blocks.0.ffn", lambda x: x.index_fill(1, torch.tensor([0]), 0.0)), SHARD2,
        ("the output of blocks.0.ffn", "at positions 0 of 16")),
    "tokens are shifted": Fault(output("embed", lambda x: x.roll(1, 1)), SHARD2, ("the output of embed",
        "the value of the token 1 earlier")),
    "samples of a micro-batch exchanged": Fault(on_rank(0, output("blocks.0", lambda x: x.flip(0))), SHARD2,
        ("the output of blocks.0", "only on rank 0", "rows")),
    "a bias that is not there": Fault(output("blocks.0.attention.wo", lambda x: x + 0.1), SHARD2,
        ("blocks.0.attention.wo", "a bias")),
    "NaN in one feature": Fault(on_rank(1, output("blocks.1.ffn.up", lambda x: x.index_fill(-1, torch.tensor([3]),
        float("inf")))), SHARD2, ("not finite",)),
    "logits are scaled": Fault(output("head", lambda x: x * 0.5), SHARD2, ("the output of head",
        "0.500 × the right one")),
    "label smoothing": Fault(wrapping("step._task.loss_sum", taking(lambda job, out, targets: (out * 0.9, targets))),
        SHARD2, ("the gradient of the output of head", "all values of the forward are right: the loss")),
    "features dropped on one stage": Fault(output("blocks.1.ffn.down", lambda x: x.index_fill(-1, torch.tensor([0, 1, 2,
        3]), 0.0)), PIPE, ("the output of blocks.1.ffn.down", "in features 0…3 of 32")),
    "a cp rank's values are scaled": Fault(on_rank(1, output("blocks.1.attention.wv", lambda x: x * 3.0)), CONTEXT,
        ("the output of blocks.1.attention.wv, only on rank 1", "3.000 × the right one")),
    "ids of a table are one off": Fault(on_module("embed", lambda m: m.register_forward_pre_hook(lambda _, args: (
        args[0] + 1,))), SHARD2, ("the output of embed", "ids are off by +1")),
    "targets are smoothed": Fault(wrapping("step._task.loss_sum", lambda job, real: lambda out, targets:
        F.cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)), SHARD2,
        ("label smoothing of 0.1",)),
    "a branch is dropped for some samples": Fault(output("blocks.0.ffn.down", lambda x: x * torch.tensor([0.0, 1.25,
        0.0, 1.25])[:, None, None]), SHARD2, ("some samples are dropped", "factors 0 and 1.25")),
    "keys of packed documents end one early": Fault(replacing(attention_mask, "key_bounds", giving(lambda job, bounds:
        replace(bounds, last_bs=bounds.last_bs - 1))), (*SHARD2,
        "data.packing=documents"), ("blocks.0.attention.core",)),
    "outputs are changed after the last module": Fault(output("", lambda x: 2.0 * x), SHARD2,
        ("the output of the model, on every rank", "2.000 × the right one")),
}  # fmt: skip
DROPOUT_FAULTS: dict[str, Fault] = {
    "tokens numbered by rank": Fault(number_local_tokens, (*TENSOR2, DROPOUT), ("those of positions 0…7",)),
    "samples numbered by micro-batch": Fault(wrapping("step._task._task.batch", giving(renumbered)), (*SHARD2, DROPOUT,
        "train.num_microbatches=2"), ("drops other elements", "samples are counted from 0 in each micro-batch")),
    "a site used twice": Fault(another_site, (*SHARD2, DROPOUT), ("drops other elements", "those of blocks.0.ffn_add")),
    "what is kept is not scaled": Fault(running("blocks.1.ffn_add", lambda m: lambda y, x, rows: x + 0.75 * (type(
        m).forward(m, y, x, rows) - x)), (*SHARD2, DROPOUT), ("1.000 instead of 1.333",)),
}  # fmt: skip
