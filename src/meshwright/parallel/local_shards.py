"""Modules that compute with local shards of their parameters, which are DTensors for everyone else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from meshwright.nn.linear import OWNER, LocalShardOwner
from meshwright.parallel.private import parameter_dict

NOTHING: Mapping[str, float] = MappingProxyType({})


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Replace a module's own parameter by a DTensor."""
    parameter = module.get_parameter(name)
    sharded = distribute_tensor(parameter.detach(), mesh, placements)
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def compute_on_local_shards(
    module: nn.Module, *, partial: Mapping[str, float] = NOTHING, owner: nn.Module | None = None
) -> None:
    """Make a module's forward see local shards in place of its own DTensor parameters.

    Each forward reads the current parameters, which FSDP2 may have unsharded. Deferred weight gradients belong to those
    parameters, too.

    Args:
        partial: parameters whose local gradients are partial instead of placed like the parameters, with the factor by
            which each rank's forward multiplies them.
        owner: module inside with the parameters, if it is not the module itself.
    """
    forward, parameters = module.forward, parameter_dict(owner or module)

    def forward_on_local(*args: Any, **kwargs: Any) -> Any:
        original = dict(parameters)
        try:
            for name, parameter in original.items():
                if isinstance(parameter, DTensor):
                    parameters[name] = local_shard(parameter, partial.get(name))
            return forward(*args, **kwargs)
        finally:
            parameters.update(original)

    module.forward = forward_on_local


def local_shard(parameter: Any, factor: float | None = None) -> Tensor:
    """Return the local shard of a DTensor to compute with, whose gradient belongs to the parameter.

    Args:
        factor: what each rank multiplies the shard by, if its local gradient is partial; None if the gradient is placed
            like the parameter.
    """
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    if factor is not None:
        placements = [Partial() for _ in placements]
    local: Tensor = parameter.to_local(grad_placements=placements)

    def wrap(gradient: Tensor) -> Tensor:
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)

    if not torch.compiler.is_compiling():  # compiled blocks defer no gradients
        setattr(local, OWNER, LocalShardOwner(parameter, wrap))
    return local if factor in (None, 1.0) else local * factor
