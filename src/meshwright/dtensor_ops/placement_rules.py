"""The words that sharding rules are written in: for one mesh axis, how outputs lie if inputs lie so."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshwright.dtensor_ops.private import is_cut

Way = tuple[list[Placement | None], list[Placement | None]]
"""Placements of the outputs and of the inputs, on one axis."""
Spec = Any
"""A tensor as DTensor shows it to a rule: `shape`, `ndim` and `placements`."""


def copies(num_outputs: int, num_inputs: int) -> Way:
    """Everything whole on every rank: always right."""
    return [Replicate()] * num_outputs, [Replicate()] * num_inputs


def cuts(dim: int, *tensors: Spec) -> list[Placement]:
    """The ways to cut a dim: in chunks, and as the tensors are cut now."""
    found: list[Placement] = [Shard(dim)]
    for tensor in tensors:
        found += [p for p in tensor.placements if is_cut(p) and p.dim == dim and p not in found]
    return found


def partials(tensor: Spec) -> list[Placement]:
    """The ways in which a tensor holds partial values now; what only chooses among values may pass them on."""
    return [p for p in dict.fromkeys(tensor.placements) if type(p) is Partial]
