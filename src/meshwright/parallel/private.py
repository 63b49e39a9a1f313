"""Adapter for private APIs of FSDP2, DeviceMesh and nn.Module, for operations without a public API.

This is the only file of `meshwright.parallel` that uses private PyTorch names: `FSDPModule._get_fsdp_state`, its
`_root_post_backward_final_callback` and `_fsdp_param_group`, the latter's `fsdp_params`, `mesh_info` and
`post_forward_mesh_info`, and `FSDPParam`'s `_unsharded_param`, `reduce_dtype`, `unsharded_accumulated_grad` and the two
methods that add to the last, all checked on 2.11 and 2.13 (the first two are also called
by `torch.distributed.pipelining` of 2.11); `DeviceMesh._flatten`, which caches meshes by name, and
`DeviceMesh._concatenate`, to join axes, checked on 2.13; `Module._parameters`; FSDP2's `_get_post_forward_mesh_info`,
called for every unit, and `HSDPMeshInfo`, checked on 2.13; `ColwiseParallel._prepare_output_fn`, checked on 2.13;
`torch._dynamo.utils.calculate_time_spent`, checked on 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor.parallel import ColwiseParallel

from meshwright.mesh.process_groups import inherit_timeout, submesh
from meshwright.nn.linear import ACCUMULATE


def compile_seconds() -> float:
    """Return the time that this process has spent on compiling."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else float(dynamo.calculate_time_spent()["total_wall_time"])


class HeadParallel(ColwiseParallel):
    """Column-parallel output head, whose module may return a loss in place of logits."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if not outputs.dim():
            return outputs
        prepare: Any = ColwiseParallel._prepare_output_fn
        return prepare(output_layouts, use_local_output, mod, outputs, device_mesh)


JOINED = "+"
"""Separator between axes in the name of a joined mesh dim."""


def joined_mesh(mesh: DeviceMesh, dims: Sequence[Sequence[str]]) -> DeviceMesh:
    """Return a mesh with one dim per set of axes, as FSDP2 takes a shard dim, preceded by a replicate dim for HSDP.

    Several axes are flattened into one dim, outermost first, and their names are joined. All ranks must call this.
    """
    if all(len(axes) == 1 for axes in dims):
        return submesh(mesh, [axes[0] for axes in dims])
    flattened = [submesh(mesh, axes)._flatten(JOINED.join(axes)) if len(axes) > 1 else mesh[axes[0]] for axes in dims]
    for one in flattened:
        inherit_timeout(one.get_group())
    return DeviceMesh._concatenate(flattened) if len(flattened) > 1 else flattened[0]


@contextmanager
def reshard_to(meshes: Mapping[int, DeviceMesh]) -> Iterator[None]:
    """Make FSDP2 reshard after the forward to meshes [between, within] by the size of their last dim.

    By itself it creates groups for every unit, which is a deadlock where ranks have different numbers of units.
    """
    fsdp: Any = _fully_shard
    original = fsdp._get_post_forward_mesh_info

    def mesh_info(after: bool | int, info: FSDPMeshInfo) -> Any:
        mesh = None if isinstance(after, bool) else meshes.get(after)
        return original(after, info) if mesh is None else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    fsdp._get_post_forward_mesh_info = mesh_info
    try:
        yield
    finally:
        fsdp._get_post_forward_mesh_info = original


def finish_backward(root: FSDPModule) -> None:
    """Run FSDP2's end-of-backward callback outside of a backward.

    Each unit outside of a backward accumulates its unsharded gradient and, if its gradient sync is on, reduces it. The
    callback then waits for the reductions.
    """
    state = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def unit_info(module: FSDPModule) -> tuple[set[nn.Parameter], bool | int] | None:
    """Return the sharded parameters of a module's FSDP2 unit and its reshard_after_forward; None without parameters.

    True reshards after the forward, False keeps the parameters unsharded, an int reshards to that many ranks.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return None
    after = group.post_forward_mesh_info
    freed: bool | int = after is not None
    if after is not None and after is not group.mesh_info:
        freed = after.shard_mesh_size
    return {param.sharded_param for param in group.fsdp_params}, freed


def prepare_accumulation(module: FSDPModule, *, last: bool) -> None:
    """Make FSDP2 accumulate all gradients of a module's unit in the reduction dtype; call before each backward.

    By itself it does so after a backward that reduces nothing, and leaves what the last one alone has, or has deferred,
    in the compute dtype, like its zeros for unused parameters. But gradients that are reduced together have one dtype.
    """
    trained = [p for p in _gathered(module) if p.sharded_param.requires_grad and p.reduce_dtype is not None]
    completes = last and any(param.unsharded_accumulated_grad is not None for param in trained)
    for param in trained:
        setattr(param._unsharded_param, ACCUMULATE, partial(_accumulate, param))
        if completes and param.unsharded_accumulated_grad is None:
            param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


def _gathered(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameters of a module's unit, if it has been gathered before."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")] if group is not None else []


def _accumulate(param: Any) -> None:
    param.accumulate_unsharded_grad_if_needed()
    param.to_accumulated_grad_if_needed()


def unsharded_parameters(module: FSDPModule) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield pairs of sharded and unsharded parameters of a module's unit, available after its first forward; gradients
    accumulate in the unsharded ones."""
    for param in _gathered(module):
        yield param.sharded_param, param._unsharded_param


def parameter_dict(module: nn.Module) -> dict[str, Any]:
    """Return the module's dict of direct parameters, which also accepts values that are not an `nn.Parameter`."""
    return cast(dict[str, Any], module._parameters)
