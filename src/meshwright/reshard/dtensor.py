"""DTensors from one layout to another, by a plan: what `DTensor.redistribute` is for PyTorch's planners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshwright.errors import LayoutError
from meshwright.reshard import private
from meshwright.reshard.context import active_context, entered
from meshwright.reshard.moving import redistributed
from meshwright.reshard.placements import ShardOrder, normal_placements, whole_order
from meshwright.reshard.rules import register_rules


def redistribute(
    x: DTensor,
    placements: Sequence[Placement],
    *,
    mesh: DeviceMesh | None = None,
    shard_order: ShardOrder | None = None,
    memory_cap_bytes: int | None = None,
) -> DTensor:
    """`x` with other placements, by the cheapest plan that fits. All ranks of the mesh call it.

    On a mesh of a part of the ranks, plans have steps over several axes once `prepare(mesh)` has made their groups.

    Differentiable, any number of times: the gradient comes back to the placements of `x`, as copies where `x` is
    partial, as with `DTensor.redistribute`.

    Args:
        x: what to move; it stays as it is.
        placements: for each mesh axis; partial ones too.
        mesh: the mesh of the result, if it is another one; see `across.redistribute_across`.
        shard_order: for tensor dims, the mesh axes that cut them in the order of the cuts; by default the axes' own.
        memory_cap_bytes: what a rank may hold at once: its part of `x`, what is under way, and its part of the result.

    Raises:
        LayoutError: the placements do not fit `x` or the mesh, or no plan fits the cap.
        CollectiveError: another rank did not come.
    """
    if mesh is not None and mesh != x.device_mesh:
        if memory_cap_bytes is not None:
            raise LayoutError(
                f"memory_cap_bytes = {memory_cap_bytes} for a transfer to another mesh",
                where="redistribute, memory_cap_bytes",
                rule="plans on one mesh keep to a cap",
                fix="memory_cap_bytes=None",
            )
        from meshwright.reshard.across import redistribute_across

        return redistribute_across(x, placements, mesh, shard_order=shard_order)
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


@contextmanager
def for_dtensor() -> Iterator[None]:
    """Within the block, DTensor's own redistributions in this thread are planned and run by Meshwright.

    That goes for operators that need other placements, `DTensor.redistribute`, `full_tensor`, and the backward if it
    runs within the block. PyTorch's own planner still has what has no layout (`_MaskPartial`), asynchronous
    redistributions, tracing, symbolic sizes, and reductions that `reduce` refuses. All ranks of a mesh enter it, or
    none. Operators get the rules of `rules`, which stay when the block ends, and keep to orders of cuts (`orders`) and
    views (`views`). Within another such block it changes nothing.
    """
    register_rules()
    if active_context():
        yield
    else:
        with entered():
            yield
