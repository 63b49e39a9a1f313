"""Redistribution of a DTensor on its own mesh, through autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshwright.errors import LayoutError
from meshwright.reshard.dtensor import private
from meshwright.reshard.dtensor.placements import ShardOrder, normal_placements, whole_order
from meshwright.reshard.dtensor.redistribute_local import redistributed


def redistribute_on_mesh(
    x: DTensor,
    placements: Sequence[Placement],
    *,
    shard_order: ShardOrder | None = None,
    memory_cap_bytes: int | None = None,
) -> DTensor:
    """`redistribute` for a result on the mesh of `x`."""
    if len(placements) != x.device_mesh.ndim:
        raise LayoutError(
            f"{len(placements)} placements for a mesh of {x.device_mesh.ndim} axes",
            where="redistribute, placements",
            rule="one placement for each mesh axis",
            fix=f"{[*placements, *[Replicate()] * x.device_mesh.ndim][: x.device_mesh.ndim]}",
        )
    target = normal_placements(placements, x.dim())
    order = whole_order(shard_order, target, x.dim())
    if not (x.requires_grad and torch.is_grad_enabled()):
        return redistributed(x, target, order, memory_cap_bytes)
    result: DTensor = _Redistribute.apply(x, target, order, memory_cap_bytes)  # type: ignore[no-untyped-call]
    return result


class _Redistribute(torch.autograd.Function):
    """The gradient of each element goes back to where the element came from."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, placements: tuple[Placement, ...], order: Any, memory_cap_bytes: int | None
    ) -> DTensor:
        spec = private.spec_of(x)
        ctx.before, ctx.cap = (spec.placements, spec.shard_order), memory_cap_bytes
        return redistributed(x, placements, order, memory_cap_bytes)

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
