"""Data parallel: FSDP2 shards parameters, gradients and optimizer state; HSDP replicates the shards (Zhao et al. 2023).

Gradients are *summed* over the data-parallel ranks: the step divides each rank's loss by the tokens of the whole
batch, so the sum is the mean over the batch whatever each rank's share of it was. FSDP2's own division is off.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.nn.block import Block
from meshwright.parallel.fsdp import finish_backward


def apply_data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: bool | int,
) -> None:
    """Shard a model, or a part of it, over `mesh`, in place: its blocks, a vocabulary's two ends, and the rest.

    Args:
        mesh: one axis (FSDP2) or two, replicas first (HSDP).
        param_dtype: dtype of gathered parameters and of compute; None keeps the parameters'.
        reduce_dtype: dtype gradients are reduced in; None keeps the gradients'.
        reshard_after_forward: free a block's gathered parameters after its forward (ZeRO-3); a number keeps them
            divided over as many neighbours instead, which the backward gathers among (hpZ of ZeRO++, Wang et al. 2023).
    """
    # Blocks add to the embedding's output out of place, so the hook that this warns of losing is kept.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    children = dict(model.named_children())
    embed, norm, head = (children.get(name) for name in ("embed", "norm", "head"))
    if embed is None or head is None or head.weight is not embed.weight:
        # Ends smaller than a block aren't worth collectives of their own: they stay in the root's unit.
        largest = max(map(num_elements, blocks), default=0)
        if isinstance(embed, nn.Embedding) and num_elements(embed) > largest:
            fully_shard(embed, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
            # A lookup's backward needs the indices only: don't gather the weight for it.
            embed.set_unshard_in_backward(False)  # type: ignore[operator]
        if norm is not None and head is not None and num_elements(head) > largest:
            # The last to be gathered are the first that backward needs: keep them.
            fully_shard([norm, head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # A tied weight stays in the root's unit, which both its modules reach.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if mesh.size() == 1:
        return  # nothing is divided by then, and on one rank FSDP2 would spend a pass over memory dividing by 1
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def num_elements(module: nn.Module) -> int:
    """Elements of a module's parameters, over all ranks."""
    return sum(parameter.numel() for parameter in module.parameters())


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP2 unit of the model: FSDP2's setters do not recurse."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered.

    Until then the model's parameters are the gathered ones: not those that the optimizer and a checkpoint know.
    """
    for module in fsdp_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, last: bool) -> None:
    """Reduce gradients in the next backward only if it is the step's `last`; until then they add up locally."""
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_is_last_backward(last)


def reduce_gradients(model: nn.Module) -> None:
    """Reduce what backwards without a reduction have added up: what put-off gradients of weights are part of."""
    set_gradient_sync(model, True)
    if isinstance(model, FSDPModule):
        finish_backward(model)


def keep_unsharded(model: nn.Module) -> None:
    """Gather all parameters, and keep them through forwards and backwards until `reshard`."""
    for module in fsdp_modules(model):
        module.set_reshard_after_backward(False, recurse=False)
        module.unshard()
