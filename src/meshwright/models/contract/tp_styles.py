"""Tensor-parallel styles of modules (Shoeybi et al. 2019), as values. Doesn't import torch.

A family assigns styles to module paths inside its kinds. `parallel/tensor` applies them with DTensor; the plan derives
from them which gradients are partial and which tensors are communicated. Modules without a style are replicated: all
tp ranks hold their parameters and compute the same result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from meshwright.features.contract import KindPart


class StyleKind(StrEnum):
    """Kind of tensor-parallel style."""

    COLUMN = "column"
    """Column-parallel linear layer: weight and bias are sharded along dim 0. The input is replicated; the output stays
    sharded."""
    ROW = "row"
    """Row-parallel linear layer: the weight is sharded along dim 1. The output is reduced into the stream."""
    VOCABULARY = "vocabulary"
    """Embedding whose table is sharded along dim 0. The output is reduced into the stream."""
    HEAD = "head"
    """Column-parallel output head. It gathers the stream; its logits stay sharded."""
    STREAM = "stream"
    """Replicated parameters applied to the stream, which sequence parallelism shards by tokens."""
    GATHER = "gather"
    """Module that gathers its first input from the stream for the column-parallel layers inside it."""
    DIVIDED = "divided"
    """Replicated parameters applied to the sharded output of a column-parallel layer: norms of queries and keys. Also
    replicated parameters inside a region."""
    REGION = "region"
    """Module that gathers its input from the stream and reduces its output into it. Inside, modules compute on local
    shards: the input is replicated, and the output and all gradients of replicated values are partial."""
    LOCAL = "local"
    """Module inside a region that computes with local shards of its parameters."""
    REPLICATED = "replicated"
    """Replicated parameters applied to replicated activations, computing on local tensors: for modules that don't take
    DTensors, or that read their parameters otherwise than by a matrix product."""
    EXPERTS = "experts"
    """Experts, called with tokens, the indices of each token's experts, and their weights; all parameters are sharded
    by expert along dim 0. The inputs are replicated; each rank adds the results of its own experts, and the output is
    reduced into the stream."""


OWN_PARAMETERS = (StyleKind.LOCAL, StyleKind.DIVIDED, StyleKind.REPLICATED, StyleKind.EXPERTS)
"""Styles of a module's own parameters only, whatever submodules it has."""


@dataclass(frozen=True)
class Style:
    """Tensor-parallel style of one module."""

    kind: StyleKind
    num_inputs: int = 1
    """Number of positional inputs of a gathering module; only the first is from the stream."""
    kept: bool = True
    """Whether the backward needs the output of a module that reduces it, such as a row-parallel layer. Recomputation
    stops before the last layer whose output it doesn't need."""
    dims: tuple[tuple[str, int], ...] = ()
    """Name and sharded dim of each parameter of a local module; parameters that are not listed are replicated."""
    summed_input: int = 0
    """Features of a local module's replicated input, whose gradient is partial; 0 if its input is sharded."""
    reduced_output: int = 0
    """Features of a local module's partial output, which is reduced into the stream; 0 if its output stays sharded.
    Each rank adds its part of replicated parameters, such as a bias."""
    gathered: bool = False
    """Whether a column-parallel layer gathers its output, and a row-parallel one takes a replicated input: for what is
    computed between them on all columns at once, such as a norm over all heads."""
    cloned: bool = False
    """Whether the output of a column-parallel or row-parallel layer is copied, for models that write to it in place."""
    partial_tail: int = 0
    """Last features of a replicated layer's output that are used by sharded heads, so their gradients are partial:
    the rotary part of keys in multi-head latent attention."""
    read_by: str | None = None
    """Path in the kind of the module whose forward reads a replicated module's parameters without calling it; None if
    the module is called."""
    top_k: int = 0
    """Experts per token, of the style experts."""

    @property
    def reduces_output(self) -> bool:
        """Whether a block's module reduces its output into the stream."""
        return self.kind in (StyleKind.ROW, StyleKind.REGION, StyleKind.EXPERTS) or self.reduced_output > 0


COLUMN, ROW, VOCABULARY = Style(StyleKind.COLUMN), Style(StyleKind.ROW), Style(StyleKind.VOCABULARY)
HEAD, STREAM, DIVIDED = Style(StyleKind.HEAD), Style(StyleKind.STREAM), Style(StyleKind.DIVIDED)
FINAL_ROW = Style(StyleKind.ROW, kept=False)
"""Style of a row-parallel layer at the end of a block, whose output is only added to the stream."""


def gather(num_inputs: int = 1) -> Style:
    """Return the style of a module that gathers its first input."""
    return Style(StyleKind.GATHER, num_inputs=num_inputs)


FINAL_REGION = Style(StyleKind.REGION, kept=False)
"""Style of a region at the end of a block, whose output is only added to the stream."""


def local(**dims: int) -> Style:
    """Return the style of a module inside a region, given the sharded dim of each of its parameters."""
    return Style(StyleKind.LOCAL, dims=tuple(sorted(dims.items())))


REPLICATED = Style(StyleKind.REPLICATED)
GATHERED_COLUMN, SPLIT_ROW = Style(StyleKind.COLUMN, gathered=True), Style(StyleKind.ROW, gathered=True)


@dataclass(frozen=True)
class LossReductions:
    """All-reduces in cross-entropy over a sharded vocabulary. By default these are PyTorch's, of the maximum, the sum
    and the target logit, which run in `vocab_context` of `train.train_step`."""

    values: tuple[int, ...] = (1, 1, 1)
    """Values per token of each."""
    tokens: int = 0
    """Tokens of one call; 0 for all of a micro-batch."""

    @classmethod
    def of(cls, parts: Iterable[KindPart]) -> LossReductions:
        """Return those of an end to which features have added these parts."""
        return next((found for part in parts if (found := part.loss_reductions()) is not None), cls())
