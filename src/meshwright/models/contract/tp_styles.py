"""Tensor-parallel styles of modules (Shoeybi et al. 2019), as values. Doesn't import torch.

A family assigns styles to module paths inside its kinds. `parallel/tensor` applies them with DTensor, and the plan
derives from the same values the axes that gradients are partial over and the tensors that are communicated. A module
without a style is replicated: all tp ranks hold its parameters and compute the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StyleKind(StrEnum):
    """Kind of tensor-parallel style."""

    COLUMN = "column"
    """Column-parallel linear layer: weight and bias are sharded by rows. Its input is replicated, its output stays
    sharded."""
    ROW = "row"
    """Row-parallel linear layer: the weight is sharded by columns. Its output is reduced into the stream."""
    VOCABULARY = "vocabulary"
    """Embedding sharded by rows of its table: its output is reduced into the stream."""
    HEAD = "head"
    """Column-parallel output head: it gathers the stream, and its logits stay sharded."""
    STREAM = "stream"
    """Replicated parameters applied to the stream, which sequence parallelism shards by tokens."""
    GATHER = "gather"
    """Module that gathers its first input from the stream for the column-parallel layers inside."""
    DIVIDED = "divided"
    """Replicated parameters applied to the sharded output of a column-parallel layer: norms of queries and keys."""


@dataclass(frozen=True)
class Style:
    """The style of one module."""

    kind: StyleKind
    num_inputs: int = 1
    """Number of positional inputs of a gathering module; only the first comes from the stream."""
    kept: bool = True
    """For row-parallel layers: the backward needs the output. Recomputation stops before the last layer whose output it
    doesn't need."""


COLUMN, ROW, VOCABULARY = Style(StyleKind.COLUMN), Style(StyleKind.ROW), Style(StyleKind.VOCABULARY)
HEAD, STREAM, DIVIDED = Style(StyleKind.HEAD), Style(StyleKind.STREAM), Style(StyleKind.DIVIDED)
FINAL_ROW = Style(StyleKind.ROW, kept=False)
"""Row-parallel layer at the end of a block, whose output is only added to the stream."""


def gather(num_inputs: int = 1) -> Style:
    """Return the style of a module that gathers its first input."""
    return Style(StyleKind.GATHER, num_inputs=num_inputs)


LOSS_REDUCTIONS = 3
"""Number of all-reduces in a cross-entropy over a sharded vocabulary, of one value per token each: maximum, sum, and
the target's logit."""
