"""What a proof looks at: the numbers that the layout's ranks and the reference each wrote down.

Plain values. The ranks record what they hold, without any collective, so that a fault in a collective can't hide
itself; `compare` puts the pieces together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.mesh.axes import Axes
from meshwright.prove.stage_placement import Stages

DTYPE = torch.float64
"""In which both sides of a proof compute."""


@dataclass(frozen=True)
class Shard:
    """The piece of a tensor that one rank holds."""

    rank: int
    offset: tuple[int, ...]
    """First index of the piece in the full tensor, per dim."""
    value: Tensor
    """The piece; its shape may hold a 0 where the tensor is smaller than the number of ranks."""


INITIAL = "initial weight"


@dataclass(frozen=True)
class UnequalCopies:
    """Two copies of a shared parameter on one rank that are not bitwise equal."""

    rank: int
    name: str
    stages: tuple[int, int]
    what: str
    """`initial weight`, `gradient of step 1`, `parameter after the last step`."""
    largest: float


@dataclass(frozen=True)
class LayoutEvidence:
    """What the ranks of the layout under proof saw, indexed by rank."""

    axes: Axes
    num_microbatches: int
    losses: list[list[float]]
    """[rank][step]: the loss each rank reports, in nats a token, a mean over the whole batch."""
    grad_norms: list[list[float]]
    """[rank][step]: the global gradient norm before clipping."""
    samples: list[list[list[int]]]
    """[rank][step]: indices of the samples the rank worked through, in order, micro-batch after micro-batch."""
    gradients: dict[str, list[Shard]]
    """Per parameter: every rank's piece of the gradient of step 1, before clipping."""
    parameters: dict[str, list[Shard]]
    """Per parameter: every rank's piece after the last step."""
    initial: dict[str, list[Shard]] = field(default_factory=dict)
    """Per parameter: every rank's piece before the first step; empty when it was not recorded."""
    after_first: dict[str, list[Shard]] = field(default_factory=dict)
    """Per parameter: every rank's piece after the first step; empty when it was not recorded. What the optimizer does
    wrong shows here before it has changed everything else."""
    stages: Stages | None = None
    """Of a pipeline."""
    unequal: tuple[UnequalCopies, ...] = ()
    """Further copies of shared parameters that are not as the rank's first, which is the one that is compared."""


@dataclass(frozen=True)
class ReferenceEvidence:
    """What one process with a plain module and a plain loop computed on the same samples."""

    losses: list[float]
    grad_norms: list[float]
    samples: list[list[int]]
    """[step]: the samples of the whole batch, in order."""
    gradients: dict[str, Tensor]
    """Full gradients of step 1, before clipping."""
    partial_gradients: dict[str, Tensor]
    """Per parameter, [data_parallel, num_microbatches, *shape]: the part of the gradient that comes from the samples
    of each cell (share of the batch, micro-batch). Their sum is `gradients`."""
    parameters: dict[str, Tensor]
    """Full parameters after the last step."""
    initial: dict[str, Tensor]
    """Full parameters before the first step."""
    partial_losses: Tensor | None = None
    """[data_parallel, num_microbatches]: what each cell adds to the loss of step 1; their sum is `losses[0]`."""
    after_first: dict[str, Tensor] = field(default_factory=dict)
    """Full parameters after the first step; empty when they were not kept."""
    stage_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Per parameter that stages share, [stage, *shape]: the part of the gradient of step 1 that comes from each stage's
    use of it. Their sum is `gradients`."""
