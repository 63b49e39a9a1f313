"""Operators of a kind: its matrix products, attention, and kernels bound by memory, with what each of them computes,
moves and launches in the forward and in the backward.

Counts are per token of a sample, before tensor parallelism shards anything; `Plan` resolves them per rank. A product
with a weight costs 2 · rows · inner · columns operations in the forward, as many for the gradient of its input and as
many for that of its weight. Doesn't import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from meshwright.models.contract.saved import Saved


class OperatorKind(StrEnum):
    """Kind of an operator, by what bounds its time."""

    PRODUCT = "product"
    """A matrix product with a weight; the style of its module says which dim tp shards."""
    GROUPED = "grouped"
    """Products of rows with the weights of the experts that they were sent to."""
    ATTENTION = "attention"
    """Both products of attention and its softmax."""
    MEMORY = "memory"
    """Kernels that move more than they compute: norms, activations, sums, casts, lookups."""


class Rerun(StrEnum):
    """Policies under which recomputation runs an operator's forward again."""

    ALWAYS = "always"
    FULL = "full"
    """Under full recomputation only: selective keeps the result."""
    NEVER = "never"
    """The backward needs no result of it, such as of a block's last product and sum."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of one pass of an operator."""

    launches: float = 0.0
    """Kernels launched per micro-batch, run eagerly. Views and allocations launch none."""
    moved: Saved = Saved()
    """Elements that they read and write, per token. Lookups read what they return."""
    casts: float = 0.0
    """Further kernels, if the compute dtype is narrower than float32: casts between it and float32."""
    cast: Saved = Saved()
    """Elements that these casts convert, per token."""
    moved_once: Saved = Saved()
    """Elements read and written once per micro-batch, whatever its tokens, such as the gradient of a table."""

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Operator:
    """An operator of a kind, or several kernels of one module that are bound by memory."""

    name: str
    """Path of the module inside the kind, of which there may be several operators."""
    kind: OperatorKind
    rows: float = 1.0
    """Rows of a product per token: experts per token, or 1 / tokens for what is computed once per sample."""
    inner: int = 0
    """Columns of a product's input."""
    columns: int = 0
    """Columns of a product's output."""
    attention_flops: float = 0.0
    """Operations of attention's forward per token; its backward takes 2.5 times as many (Dao 2023)."""
    forward: Kernels = Kernels()
    """Kernels bound by memory: of a product those besides it, such as of a bias; of attention what its own moves."""
    backward: Kernels = Kernels()
    fused_forward: Kernels | None = None
    """As `forward` in a compiled block; None if the kernels become a part of other operators' kernels."""
    fused_backward: Kernels | None = None
    fused_on_cuda: bool = False
    """Whether CUDA runs the fused kernels also eagerly, as it does for norms."""
    rerun: Rerun = Rerun.ALWAYS
    input_gradient: bool = True
    """Whether the backward computes the gradient of the input; not of what takes ids or samples."""
    second_gradient: bool = False
    """Whether the backward computes the gradient of a second operand that isn't a parameter."""
    kept: Saved = Saved()
    """Results besides a product's that selective recomputation keeps (`nn/kept_results.py`), such as attention's."""
    dropped: Kernels = Kernels()
    """Kernels that `train.dropout` adds to the backward, and to both passes of compiled blocks: it isn't fused."""
    groups: int = 1
    """Matrices that divide the rows of a grouped product, if the kind doesn't describe its experts."""
    wide: bool = False
    """Whether a product computes in at least float32."""

    @property
    def flops(self) -> float:
        """Operations of the forward per token that `FlopCounterMode` counts: those of products and attention."""
        return 2.0 * self.rows * self.inner * self.columns + self.attention_flops
