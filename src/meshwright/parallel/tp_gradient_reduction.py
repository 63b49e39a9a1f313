"""Reduce gradients over `tp`, for norms and other replicated parameters under sequence parallelism.

The plan lists the gradients that are partial over `tp`; [Note: partial gradients] in `plan.verify` states the rule.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import all_reduce_sum
from meshwright.mesh.local_shards import to_local


def sync_partial_gradients(model: nn.Module) -> None:
    """Redistribute each gradient to its parameter's placements, after the last backward.

    Under sequence parallelism, a norm's weight is replicated, but its gradient covers only the rank's tokens and is
    partial. FSDP2 reduces such gradients itself. Without FSDP2 nothing else would, and the loss would still look fine.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def average_replicated_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of each parameter that is replicated over `tp`.

    A codec's rounding depends on neighbouring elements, which belong to different shards on different TP ranks. With
    compressed gradients or weights, replicas therefore get different gradients and would drift apart.

    Args:
        model: model with reduced gradients.
        mesh: mesh with the axis `tp`.
    """
    gradients = [to_local(p.grad) for p in model.parameters() if p.grad is not None and _is_replicated(p)]
    if not gradients:
        return
    mean = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce_sum(mean, group=mesh.get_group("tp")).div_(mesh["tp"].size())
    for gradient, part in zip(gradients, torch.split(mean, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _is_replicated(parameter: nn.Parameter) -> bool:
    """Return True if the parameter is replicated over `tp`."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in axes and parameter.placements[axes.index("tp")].is_replicate()
