"""Data parallelism: FSDP2 shards parameters, gradients and optimizer state; HSDP replicates shards (Zhao et al. 2023).
And gradients that are partial over `tp`, of norms and other replicated parameters under sequence parallelism: the plan
lists them, and [Note: partial gradients] in `plan.verify` states the rule.

Gradients are *summed* over the data-parallel ranks: each rank divides its loss by the token count of the global batch,
so the sum is the mean over the batch, even if ranks have different numbers of tokens. FSDP2's division is disabled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.comm.collectives import all_reduce_sum
from meshwright.comm.compression.catalogue import EXACT
from meshwright.mesh.local_shards import to_local
from meshwright.mesh.process_groups import consecutive_groups
from meshwright.parallel.private import finish_backward, joined_mesh, prepare_accumulation, reshard_to
from meshwright.parallel.rank_model import RankModel
from meshwright.plan.run_plan import RunPlan, Stage, Unit


@contextmanager
def secondary_shards(mesh: DeviceMesh | None, plan: RunPlan) -> Iterator[None]:
    """Create the groups of secondary shards, which the units of all stages share; all ranks must enter this."""
    axes = plan.mesh.view("fsdp")
    units = (unit for stage in plan.stages for unit in plan.units(stage))
    sizes = {unit.freed for unit in units if not isinstance(unit.freed, bool)} - {plan.mesh.size(*axes)}
    meshes = {} if mesh is None else {size: consecutive_groups(mesh, axes, size) for size in sorted(sizes)}
    with reshard_to(meshes):
        yield


def apply_units(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Shard a stage's module with FSDP2, unit by unit, in place."""
    # The warning concerns views modified in place, which lose a hook; blocks never modify them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    inner = [(kind, layer, unit) for kind, layer in plan.held(stage) for unit in kind.units]
    dims = {
        module.get_parameter(kind.full_name(one.name, layer)): Shard(one.stored_dim)
        for kind, layer, one in plan.parameters(stage)
        if one.stored_dim
    }
    # FSDP2 requires nested units to be wrapped inside out.
    for kind, layer, unit in sorted(inner, key=lambda entry: (not entry[0].is_block, -_depth(entry[2]))):
        unit_modules = [module.get_submodule(kind.full_name(path, layer)) for path in unit.modules]
        is_experts = kind.experts is not None and unit.modules == (kind.experts.experts,)
        _shard_unit(unit_modules, mesh, plan, unit, dims, casts_inputs=not is_experts)
        if not unit.in_backward:
            for unit_module in unit_modules:
                unit_module.set_unshard_in_backward(False)  # type: ignore[operator]
    _shard_unit([module], mesh, plan, stage.root, dims)
    if plan.mesh.size(*stage.root.sharded, *stage.root.replicas) == 1:
        return  # FSDP2 doesn't divide on one rank; setting the factor would add a pass over memory to divide by 1
    for wrapped in fsdp_modules(module):
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)


def _depth(unit: Unit) -> int:
    """Return the nesting depth of a unit's modules within its kind."""
    return max(len(path.split(".")) if path else 0 for path in unit.modules)


def _shard_unit(
    modules: list[nn.Module], mesh: DeviceMesh, plan: RunPlan, unit: Unit, dims: Mapping[nn.Parameter, Shard], *,
    casts_inputs: bool = True,
) -> None:  # fmt: skip
    """Shard one unit with FSDP2 or HSDP, along other dims than 0 for some parameters; compressed gradients are reduced
    over replicas by a separate hook."""
    is_native = bool(unit.replicas) and unit.gradients == EXACT
    is_mixed = unit.compute != plan.masters
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, unit.compute) if is_mixed else None,
        reduce_dtype=getattr(torch, unit.reduce) if is_mixed or unit.reduce != plan.masters else None,
        # Experts take rows of the compute dtype, and routing weights that must stay wider.
        cast_forward_inputs=casts_inputs,
    )
    sharded = unit.sharded or dict(plan.mesh.views)["fsdp"][:1]
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=joined_mesh(mesh, [unit.replicas, sharded] if is_native else [sharded]),
        mp_policy=policy,
        reshard_after_forward=unit.freed,
        shard_placement_fn=dims.get if dims else None,
    )


def fsdp_modules(model: nn.Module | RankModel) -> list[FSDPModule]:
    """Return all FSDP2 modules of the model, for FSDP2 setters that do not recurse."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reduce_unused(model: nn.Module) -> None:
    """Reduce zeros for parameters without a gradient: ranks differ in which these are, if a forward depends on values,
    such as which experts have tokens."""
    for wrapped in fsdp_modules(model):
        if hasattr(wrapped, "set_reduce_scatter_unused_params"):  # since PyTorch 2.13
            wrapped.set_reduce_scatter_unused_params(True, recurse=False)


def complete_gradients(model: nn.Module | RankModel) -> None:
    """Give a gradient of zeros to trained parameters without one, so that every layout updates the same ones."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def reshard(model: nn.Module) -> None:
    """Reshard parameters that a forward without a backward left unsharded.

    Until then the model's parameters are the unsharded ones, not those that the optimizer and checkpoints refer to.
    """
    for module in fsdp_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, last: bool) -> None:
    """Reduce gradients in the next backward if it is the step's `last`; otherwise accumulate them locally."""
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_is_last_backward(last)
        prepare_accumulation(module, last=last)


def reduce_gradients(model: nn.Module) -> None:
    """Reduce the gradients accumulated locally."""
    set_gradient_sync(model, True)
    if isinstance(model, FSDPModule):
        finish_backward(model)


def keep_unsharded(model: nn.Module) -> None:
    """Unshard all parameters, and keep them unsharded through forwards and backwards until `reshard`."""
    for module in fsdp_modules(model):
        module.set_reshard_after_backward(False, recurse=False)
        module.unshard()


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
    """
    gradients = []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                gradients.append(to_local(parameter.grad))
    if not gradients:
        return
    mean = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce_sum(mean, group=mesh.get_group("tp")).div_(mesh["tp"].size())
    for gradient, part in zip(gradients, torch.split(mean, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
