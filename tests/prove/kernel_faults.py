"""Seeded faults of what only runs as configured have: kernels, compiled blocks and graphs. Each is the same on the CPU
and on a GPU, whose kernels are called by the same functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.capture.run.static_tensors import StaticTensors
from meshwright.nn.attention.attention import LocalAttention
from meshwright.nn.dropout_add import eager
from meshwright.nn.dropout_add import module as dropout
from meshwright.nn.experts import grouped_linear
from tests.prove.seeded_faults import Fault, replacing

BLOCK = "the first value that differs is the output of blocks.0"
PACKED = "packed"
"""Word for a source of documents that are packed."""
ATTENTION = "blocks.0.attention.wq.weight"


def with_masks_of_other_tokens(run: Callable[..., None]) -> Callable[..., None]:
    """A dropout whose backward, which has no residual, drops by the numbers of the next tokens."""

    def other(x: Any, residual: Any, rows: Any, *args: Any, **named: Any) -> None:
        run(x, residual, rows + 1 if residual is None else rows, *args, **named)

    return other


def drop_by_other_tokens(job: Any, step: Any) -> None:
    launch = dropout.find_triton() if job.device.type == "cuda" else None
    if launch is not None:
        dropout.find_triton = lambda: with_masks_of_other_tokens(launch)
    eager.dropout_add = with_masks_of_other_tokens(eager.dropout_add)


def compile_with_a_factor() -> None:
    """Compiled blocks return 1.1 times what they should; on the CPU, for which Inductor takes a minute, as traced."""
    real = nn.Module.compile

    def compiled(self: nn.Module, **named: Any) -> None:
        real(self, **named if torch.cuda.is_available() else {"backend": "aot_eager"})
        self.register_forward_hook(lambda _, args, out: out * 1.1)

    nn.Module.compile = compiled  # type: ignore[method-assign, assignment]


def without_documents(job: Any, real: Any) -> Any:
    return lambda self, mask, *layout, **named: real(self, replace(mask, documents=None), *layout, **named)


def of_the_neighbour(job: Any, real: Any) -> Any:
    return lambda rows, matrices, groups: real(rows, matrices.roll(1, 0), groups)


def never_copied(job: Any, real: Any) -> Any:
    return lambda self, content, value: real(self, content, value * 0)


COMPILED = "a compiled block returns too much"
REPLACED = (LocalAttention, dropout, eager, grouped_linear, StaticTensors, nn.Module)
BEFORE = {COMPILED: compile_with_a_factor}
FAULTS: dict[str, Fault] = {
    "documents see each other": Fault(replacing(LocalAttention, "prepare", without_documents),
        (PACKED,), (), ATTENTION),
    "experts multiply by their neighbours' matrices": Fault(replacing(grouped_linear, "multiply", of_the_neighbour),
        ("moe-tiny",), (), "blocks.0.moe.experts.up"),
    "the backward drops other elements": Fault(drop_by_other_tokens, ("train.dropout=0.25",), (), ATTENTION),
    "graphs read memory to which nothing was copied": Fault(replacing(StaticTensors, "write", never_copied),
        ("capture.scope=layer", "train.num_microbatches=2"), ()),
    COMPILED: Fault(lambda job, step: None, ("train.compile=true",), (BLOCK,)),
}  # fmt: skip
"""By name, in float32; the preset is a word of the layout."""
