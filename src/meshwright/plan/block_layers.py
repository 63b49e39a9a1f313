"""Layers of a block that communicate, attention and mixtures of experts, and the bytes that a kind keeps for its
backward, as a plan has them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.float8.recipe import Float8Recipe
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.context.method import ContextMethod
from meshwright.plan.mesh_views import Atoms


@dataclass(frozen=True)
class AttentionLayer:
    """The attention layer of a kind."""

    module: str
    mask: MaskSpec
    """Rules of the mask, without documents."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    axes: Atoms
    """Atoms over which the tokens of a sample are sharded."""
    method: ContextMethod | None = None
    """How queries meet the keys of other ranks; None if every rank has all tokens."""


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture-of-experts layer of a kind, and the dispatch of tokens to it."""

    module: str
    experts: str
    """Path of the module with the experts' parameters."""
    num_experts: int
    top_k: int
    width: int
    """Elements of a row sent to an expert."""
    axes: Atoms
    """Atoms over which the experts are sharded; empty if every rank holds all of them."""
    counted: Atoms
    """Atoms over which each forward sums the experts' counts of a micro-batch."""
    num_groups: int = 1
    """Groups of consecutive experts; a token's experts are in `top_groups` of them."""
    top_groups: int = 1
    capacity: int | None = None
    """Slots per expert and sample; None if nothing is dropped."""
    uniform: bool = False
    """Whether tokens go to experts in turn, so that the dispatch is known."""
    sample_counted: Atoms = ()
    """Atoms over which each forward sums the experts' counts of each sample."""


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers of a kind that run in float8."""

    recipe: Float8Recipe
    layers: tuple[str, ...]
    """Paths of the layers inside the block."""
    history: int = 0
    """Steps that scales look back on; 0 unless they are delayed."""
    cached: bool = False
    """Whether weights are cast once per step instead of in every forward and backward."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a kind keeps between forward and backward under each policy, per rank and sample."""

    none: int
    selective: int
    full: int

    def under(self, policy: RecomputePolicy) -> int:
        """Return the bytes under a policy."""
        found: int = getattr(self, policy)
        return found
