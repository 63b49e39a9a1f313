"""One entry that lays a plain model on a mesh: tensor parallel, then compilation, then data parallel.

The order matters: FSDP2 shards what tensor parallel left on each rank, and a block is compiled before FSDP2 hangs
its hooks on it, so that a graph holds exactly one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.mesh.axes import Axes
from meshwright.mesh.groups import submesh
from meshwright.nn.block import Block
from meshwright.parallel.data import apply_data_parallel
from meshwright.parallel.tensor import apply_tensor_parallel, await_embedding


@dataclass(frozen=True)
class ParallelOptions:
    """How a model is laid on its mesh, beyond the axes' sizes."""

    sequence_parallel: bool = True
    reshard_after_forward: bool | int = True
    """True and False as FSDP2's; a number of ranks that keep a whole copy between them (hpZ)."""
    param_dtype: torch.dtype | None = None
    """Compute dtype under FSDP2's mixed-precision policy; None computes in the parameters' dtype."""
    reduce_dtype: torch.dtype | None = None
    replicas_apart: bool = False
    """FSDP2 shards over dp_shard only, and somebody else reduces gradients over dp_replicate."""
    recompute: bool = False
    """Each block keeps only its input for the backward."""
    compile: bool = False


def needs_mesh(axes: Axes, options: ParallelOptions) -> bool:
    """Whether a layout needs a device mesh: one rank does only for FSDP2's mixed precision."""
    return axes.num_ranks() > 1 or options.param_dtype is not None


def apply_parallel(model: nn.Module, mesh: DeviceMesh | None, axes: Axes, options: ParallelOptions) -> None:
    """Lay `model`, still on the meta device, on `mesh` in place.

    Args:
        model: a model or a part of it, with a `tie()` that shares what is tied.
        mesh: the mesh of all axes; None where `needs_mesh` says that none is needed.
        axes: its sizes.
        options: everything else.
    """
    if mesh is not None and axes.tp > 1:
        apply_tensor_parallel(model, submesh(mesh, ["tp"]), sequence_parallel=options.sequence_parallel)
        model.tie()  # type: ignore[operator]
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if mesh is not None and axes.tp > 1 and (options.compile or not blocks) and "embed" in dict(model.named_children()):
        await_embedding(model)
    if options.recompute:
        for block in blocks:
            block.recomputes = True
    if options.compile:
        for block in blocks:
            block.compile()
    if mesh is not None and (axes.data_parallel() > 1 or options.param_dtype is not None):
        is_native = axes.dp_replicate > 1 and not options.replicas_apart
        names = ["dp_replicate", "dp_shard"] if is_native else ["dp_shard"]
        apply_data_parallel(
            model,
            submesh(mesh, names),
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            reshard_after_forward=options.reshard_after_forward,
        )
