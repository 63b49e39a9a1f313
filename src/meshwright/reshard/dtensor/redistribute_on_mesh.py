"""Differentiable redistribution of a DTensor on its own mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshwright.errors import LayoutError
from meshwright.reshard.dtensor import private
from meshwright.reshard.dtensor.placements import FullShardOrder, ShardOrder, full_shard_order, normalize_placements
from meshwright.reshard.dtensor.redistribute_local import redistribute_detached
from meshwright.units import counted


def redistribute_on_mesh(
    x: DTensor,
    placements: Sequence[Placement],
    *,
    shard_order: ShardOrder | None = None,
    memory_cap_bytes: int | None = None,
) -> DTensor:
    """Redistribute `x` on its own mesh; see `redistribute`."""
    if len(placements) != x.device_mesh.ndim:
        raise LayoutError(
            f"{counted(len(placements), 'placement')} for a mesh of {counted(x.device_mesh.ndim, 'axis')}",
            where="redistribute, placements",
            rule="one placement for each mesh axis",
            fix=f"{[*placements, *[Replicate()] * x.device_mesh.ndim][: x.device_mesh.ndim]}",
        )
    target = normalize_placements(placements, x.dim())
    order = full_shard_order(shard_order, target, x.dim())
    if not (x.requires_grad and torch.is_grad_enabled()):
        return redistribute_detached(x, target, order, memory_cap_bytes)
    result: DTensor = _Redistribute.apply(x, target, order, memory_cap_bytes)  # type: ignore[no-untyped-call]
    return result


class _Redistribute(torch.autograd.Function):
    """Autograd function that redistributes gradients back to the original placements."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, placements: tuple[Placement, ...], order: FullShardOrder, memory_cap_bytes: int | None
    ) -> DTensor:
        spec = private.spec_of(x)
        ctx.before, ctx.cap = (spec.placements, spec.shard_order), memory_cap_bytes
        return redistribute_detached(x, placements, order, memory_cap_bytes)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor, None, None, None]:
        (gradient,) = gradients
        placements, order = ctx.before
        target = tuple(
            Replicate() if before.is_partial() and now != before else before
            for before, now in zip(placements, gradient.placements, strict=True)
        )
        back: DTensor = _Redistribute.apply(gradient, target, order, ctx.cap)  # type: ignore[no-untyped-call]
        return back, None, None, None
