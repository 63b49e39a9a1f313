"""Tensors on meshes, for tests: the same numbers on all ranks, laid out as asked."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate


def place(x, mesh, placements):
    """A DTensor of `x`, which all ranks have; a partial one has a part of each value on each rank."""
    partial = [p.is_partial() for p in placements]
    whole = DTensor.from_local(x.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    if not any(partial):
        return whole.redistribute(placements=placements)
    num = 1
    for axis, is_partial in enumerate(partial):
        num *= mesh.size(axis) if is_partial else 1
    kept = whole.redistribute(placements=[Replicate() if p else q for p, q in zip(partial, placements, strict=True)])
    own = kept.to_local() / num
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
