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

from meshwright.comm.compression.catalogue import EXACT
from meshwright.parallel.private import finish_backward, joined_mesh
from meshwright.parallel.rank_model import RankModel
from meshwright.plan.run_plan import RunPlan, Stage, Unit


def apply_units(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Shard a stage's module with FSDP2, unit by unit, in place.

    Args:
        module: of the stage.
        mesh: of all axes.
        plan: of the run.
        stage: of the plan, which says the units.
    """
    # Blocks add to the embedding's output out of place, so the hook that this warns of losing is kept.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    inner = [(kind, layer, unit) for kind, layer in plan.held(stage) for unit in kind.units]
    # FSDP2 wants what is inside another unit wrapped first.
    for kind, layer, unit in sorted(inner, key=lambda one: (not one[0].is_block, -_depth(one[2]))):
        found = [module.get_submodule(kind.full_name(path, layer)) for path in unit.modules]
        _shard(found, mesh, plan, unit)
        if not unit.in_backward:
            for one in found:
                one.set_unshard_in_backward(False)  # type: ignore[operator]
    _shard([module], mesh, plan, stage.root)
    if plan.mesh.size(*stage.root.sharded, *stage.root.replicas) == 1:
        return  # nothing is divided by then, and on one rank FSDP2 would spend a pass over memory dividing by 1
    for wrapped in fsdp_modules(module):
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)


def _depth(unit: Unit) -> int:
    """How deep inside its kind a unit's modules are."""
    return max(len(path.split(".")) if path else 0 for path in unit.modules)


def _shard(modules: list[nn.Module], mesh: DeviceMesh, plan: RunPlan, unit: Unit) -> None:
    """One unit, over one axis (FSDP2) or two, replicas first (HSDP). Compressed gradients are reduced over replicas by
    their own hook."""
    is_native = bool(unit.replicas) and unit.gradients == EXACT
    is_mixed = unit.compute != plan.masters
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, unit.compute) if is_mixed else None,
        reduce_dtype=getattr(torch, unit.reduce) if is_mixed or unit.reduce != plan.masters else None,
    )
    sharded = unit.sharded or dict(plan.mesh.views)["fsdp"][:1]
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=joined_mesh(mesh, [unit.replicas, sharded] if is_native else [sharded]),
        mp_policy=policy,
        reshard_after_forward=unit.freed,
    )


def fsdp_modules(model: nn.Module | RankModel) -> list[FSDPModule]:
    """Every FSDP2 unit of the model: FSDP2's setters do not recurse."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered.

    Until then the model's parameters are the gathered ones: not those that the optimizer and a checkpoint know.
    """
    for module in fsdp_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, last: bool) -> None:
    """Reduce gradients in the next backward only if it is the step's `last`; until then they accumulate locally."""
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_is_last_backward(last)


def reduce_gradients(model: nn.Module) -> None:
    """Reduce what backwards without a reduction have accumulated: which deferred gradients of weights are part of."""
    set_gradient_sync(model, True)
    if isinstance(model, FSDPModule):
        finish_backward(model)


def keep_unsharded(model: nn.Module) -> None:
    """Gather all parameters, and keep them through forwards and backwards until `reshard`."""
    for module in fsdp_modules(model):
        module.set_reshard_after_backward(False, recurse=False)
        module.unshard()
