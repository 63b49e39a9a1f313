"""Building blocks of sharding rules: placements of outputs and inputs on one mesh axis."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshwright.dtensor_ops.private import is_shard

Sharding = tuple[list[Placement | None], list[Placement | None]]
"""Placements of the outputs and of the inputs on one mesh axis."""
Spec = Any
"""Tensor argument as DTensor passes it to a rule, with `shape`, `ndim` and `placements`."""


def all_replicated(num_outputs: int, num_inputs: int) -> Sharding:
    """Return replicated placements for all outputs and inputs, which are always correct."""
    return [Replicate()] * num_outputs, [Replicate()] * num_inputs


def dim_shards(dim: int, *tensors: Spec) -> list[Placement]:
    """Return the candidate placements that shard `dim`: `Shard` and the tensors' current (strided) placements."""
    candidates: list[Placement] = [Shard(dim)]
    for tensor in tensors:
        candidates += [p for p in tensor.placements if is_shard(p) and p.dim == dim and p not in candidates]
    return candidates


def partials(tensor: Spec) -> list[Placement]:
    """Return a tensor's partial placements, which operators that only select values can pass through."""
    return [p for p in dict.fromkeys(tensor.placements) if type(p) is Partial]
