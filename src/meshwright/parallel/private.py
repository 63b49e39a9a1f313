"""The one adapter of this room to what FSDP2, DeviceMesh and modules have no public call for.

Private PyTorch names are used here and nowhere else in this room: `FSDPModule._get_fsdp_state`, its
`_root_post_backward_final_callback` and `_fsdp_param_group`, and of that `fsdp_params`, `mesh_info`,
`post_forward_mesh_info`, and `FSDPParam._unsharded_param`. Checked on 2.11 and 2.13;
`torch.distributed.pipelining` of 2.11 calls the first two as well. Of meshes `DeviceMesh._flatten`, which keeps what it
made by name, and `DeviceMesh._concatenate`, where axes are joined: checked on 2.13. Of modules `_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from meshwright.mesh.process_groups import submesh

JOINED = "+"
"""Between the axes in the name of a dim that is made of several."""


def joined_mesh(mesh: DeviceMesh, dims: Sequence[Sequence[str]]) -> DeviceMesh:
    """A mesh with a dim for each of some sets of axes: FSDP2 takes one to shard over, and one of replicas before it.

    A dim of several axes is their product, outermost first, and has their names joined. All ranks call it alike.
    """
    if all(len(axes) == 1 for axes in dims):
        return submesh(mesh, [axes[0] for axes in dims])
    made = [submesh(mesh, axes)._flatten(JOINED.join(axes)) if len(axes) > 1 else mesh[axes[0]] for axes in dims]
    return DeviceMesh._concatenate(made) if len(made) > 1 else made[0]


def finish_backward(root: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward, outside of one.

    Every unit whose backward is not under way adds its unsharded gradient to what it has, and, if its sync is on,
    reduces all of it; then the reductions are waited for.
    """
    state = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def unit_of(module: FSDPModule) -> tuple[set[nn.Parameter], bool | int] | None:
    """The parameters, sharded, that FSDP2 gathers together with a module, and what it does with them after a forward.

    True frees them, False keeps them, a number keeps them among as many ranks. None for a module with none of its own.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return None
    after = group.post_forward_mesh_info
    freed: bool | int = after is not None
    if after is not None and after is not group.mesh_info:
        freed = after.shard_mesh_size
    return {one.sharded_param for one in group.fsdp_params}, freed


def unsharded_parameters(module: FSDPModule) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Sharded and gathered parameters of a module's unit: autograd gives the gathered ones their gradients. After its
    first forward."""
    group = module._get_fsdp_state()._fsdp_param_group
    for one in group.fsdp_params if group is not None else ():
        if hasattr(one, "_unsharded_param"):
            yield one.sharded_param, one._unsharded_param


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The module's own parameters by name, as it looks them up: what is put here need not be an `nn.Parameter`."""
    return cast(dict[str, Any], module._parameters)
