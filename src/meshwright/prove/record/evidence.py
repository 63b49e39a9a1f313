"""Evidence of a proof: values recorded by the ranks of the layout and by the reference.

Ranks record local shards without using collectives, so a faulty collective cannot mask its own error. `compare`
assembles the shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from meshwright.mesh.axes import Axes
from meshwright.prove.placement import ExpertPlacement, StagePlacement

DTYPE = torch.float64
"""Dtype of both sides of a proof."""


@dataclass(frozen=True)
class RecordedShard:
    """Local shard of a tensor, as recorded by one rank."""

    rank: int
    offset: tuple[int, ...]
    """Start index of the shard in the full tensor, per dim."""
    value: Tensor
    """Local values; may be empty if the sharded dim is smaller than the number of ranks."""


INITIAL = "initial weight"


@dataclass(frozen=True)
class UnequalCopies:
    """Two copies of a shared parameter on one rank that are not bitwise equal."""

    rank: int
    name: str
    stages: tuple[int, int]
    what: str
    """Kind of value: `initial weight`, `gradient of step 1` or `parameter after the last step`."""
    largest: float
    """Largest absolute difference."""


Contents = dict[int, dict[str, str]]
"""Digests by sample and by part of it, such as `inputs` and `targets`."""


@dataclass(frozen=True)
class LayoutEvidence:
    """Values recorded by the ranks of the layout under proof, indexed by rank."""

    axes: Axes
    num_microbatches: int
    losses: list[list[float]]
    """[rank][step]: loss as reported by each rank, averaged over the global batch."""
    grad_norms: list[list[float]]
    """[rank][step]: global gradient norm before clipping."""
    samples: list[list[list[int]]]
    """[rank][step]: indices of the samples processed by the rank, in micro-batch order."""
    gradients: dict[str, list[RecordedShard]]
    """Per parameter: shards of the gradient of step 1, before clipping."""
    parameters: dict[str, list[RecordedShard]]
    """Per parameter: shards after the last step."""
    initial: dict[str, list[RecordedShard]] = field(default_factory=dict)
    """Per parameter: shards before the first step; empty if not recorded."""
    after_first: dict[str, list[RecordedShard]] = field(default_factory=dict)
    """Per parameter: shards after the first step; empty if not recorded. Optimizer faults are visible here before they
    affect everything else."""
    stages: StagePlacement | None = None
    """Stage placement of a pipeline."""
    experts: ExpertPlacement | None = None
    """Placement of experts; None for a model without any."""
    unequal: tuple[UnequalCopies, ...] = ()
    """Copies of shared parameters that differ from the rank's first copy; only the first is compared."""
    contents: list[list[Contents]] = field(default_factory=list)
    """[rank][step]: digests of the samples that the rank read; empty if not recorded."""
    rates: list[list[float]] = field(default_factory=list)
    """[rank][step]: learning rates; empty if not recorded."""
    nonfinite: list[dict[str, list[str]]] = field(default_factory=list)
    """[rank]: names of what changed in steps that must be skipped, by what was not finite in them."""


@dataclass(frozen=True)
class ReferenceEvidence:
    """Values computed in a single process by a plain module and training loop on the same samples."""

    losses: list[float]
    grad_norms: list[float]
    samples: list[list[int]]
    """[step]: indices of the samples of the global batch, in order."""
    gradients: dict[str, Tensor]
    """Full gradients of step 1, before clipping."""
    partial_gradients: dict[str, Tensor]
    """Per parameter, [data_parallel, num_microbatches, *shape]: gradient contributions, which sum to `gradients`."""
    parameters: dict[str, Tensor]
    """Full parameters after the last step."""
    initial: dict[str, Tensor]
    """Full parameters before the first step."""
    partial_losses: Tensor | None = None
    """[data_parallel, num_microbatches]: contributions to the loss of step 1, which sum to `losses[0]`."""
    after_first: dict[str, Tensor] = field(default_factory=dict)
    """Full parameters after the first step; empty if not recorded."""
    stage_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Per shared parameter, [stage, *shape]: contributions to the gradient of step 1, which sum to `gradients`."""
    partial_counts: dict[str, Tensor] = field(default_factory=dict)
    """Per buffer that counts the tokens of experts, [data_parallel, num_microbatches, expert]: counts of step 1."""
    contents: Contents = field(default_factory=dict)
    """Digests of the samples of all steps; empty if the family's reference doesn't show them."""
    bias_rates: dict[str, float] = field(default_factory=dict)
    """Per counting buffer of a layer with a balancing bias: the step by which the bias changes."""


@dataclass(frozen=True)
class ContextEvidence:
    """Contributions to step 1 of the tokens on each context-parallel rank of each data-parallel rank."""

    partial_gradients: dict[str, Tensor]
    """Per parameter, [data_parallel × cp, num_microbatches, *shape]; those that sum to the gradient are known."""
    partial_losses: Tensor
    """[data_parallel × cp, num_microbatches]: contributions to the loss."""


@dataclass(frozen=True)
class Variant:
    """The reference with a known fault, to be compared with a layout whose fault is not recognised."""

    what: str
    """How the reference was changed, such as `routing weights squared`."""
    cause: str
    """Fault of a layout that computes the same."""
    evidence: ReferenceEvidence
    is_linear: bool = False
    """Whether the change removes a term, so that multiples of the term can be told from each other."""


class Variants(Protocol):
    """Faulty references of a model, computed when asked for."""

    def of_first_step(self) -> Iterator[Variant]:
        """Yield variants that differ in step 1, computed for that step."""

    def of_later_steps(self) -> Iterator[Variant]:
        """Yield variants that differ from step 2 on."""
