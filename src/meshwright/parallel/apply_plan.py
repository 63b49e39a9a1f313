"""Parallelize a stage's plain module as planned: expert and context parallelism, float8 layers, tensor parallelism,
recomputation, compilation, FSDP units.

The order matters: float8 layers get the hooks of tensor parallelism, recomputation preserves a block's names and hooks,
a compiled graph contains exactly one block and its recomputation, and FSDP2 shards the tensor-parallel shards and
installs its hooks on the compiled modules.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from meshwright.comm.collectives import all_reduce_sum
from meshwright.mesh.process_groups import submesh
from meshwright.models.contract.build_module import tie_parameters
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.nn.experts.balance import BatchCounts, SampleCounts
from meshwright.nn.recompute import recompute
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.parallel.context.apply import apply_context
from meshwright.parallel.data_parallel import apply_units
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from meshwright.parallel.float8 import apply_float8, multiply_shards
from meshwright.parallel.local_shards import compute_on_local_shards, shard_parameter
from meshwright.parallel.private import joined_mesh
from meshwright.parallel.tensor_parallel import apply_styles, wait_for_embeddings
from meshwright.plan.block_layers import ExpertLayer
from meshwright.plan.mesh_views import Atoms
from meshwright.plan.run_plan import Kind, RunPlan, Stage


def needs_mesh(plan: RunPlan) -> bool:
    """Return True if a plan needs a device mesh; a single rank needs one only for FSDP2's mixed precision."""
    return plan.mesh.num_ranks() > 1 or plan.has_units


def apply_plan(module: nn.Module, mesh: DeviceMesh | None, plan: RunPlan, stage: Stage, facts: ModelFacts) -> None:
    """Parallelize the module of a stage in place, while it is on the meta device.

    Args:
        module: module built by the model family.
        mesh: mesh of all axes; None if `needs_mesh` is False.
        plan: plan of the run.
        stage: the stage in `plan`.
        facts: facts of the model, used to restore tied weights.
    """
    if mesh is not None:
        apply_experts(module, mesh, plan, stage)
        apply_context(module, mesh, plan, stage)
    blocks = [
        (kind, module.get_submodule(kind.full_name("", layer))) for kind, layer in plan.held(stage) if kind.is_block
    ]
    for kind, block in blocks:
        if kind.float8 is not None:
            apply_float8(block, kind.float8)
    if mesh is not None and plan.mesh.view("tp"):
        apply_styles(module, submesh(mesh, ["tp"]), plan, stage)
        tie_parameters(module, facts)
        for kind, block in blocks:
            if kind.float8 is not None:
                multiply_shards(block, kind.float8)
    if mesh is not None and plan.mesh.view("tp") and (not blocks or any(kind.compiled for kind, _ in blocks)):
        wait_for_embeddings(module, plan, stage)
    for kind, block in blocks:
        recompute(block, RecomputePolicy(kind.recompute))
        if kind.compiled:
            block.compile()
    if mesh is not None and plan.has_units:
        apply_units(module, mesh, plan, stage)


def apply_experts(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Shard the experts of a stage's module, and let its layers dispatch tokens, in place.

    Args:
        module: module of the stage, on the meta device.
        mesh: mesh of all axes.
        plan: plan of the run.
        stage: the stage in `plan`.
    """
    for kind, layer in plan.held(stage):
        experts = kind.experts
        if experts is None:
            continue
        if experts.axes:
            _shard_layer(module.get_submodule(kind.full_name("", layer)), mesh, plan, kind, experts)
        for inner in module.get_submodule(kind.full_name(experts.module, layer)).modules():
            if isinstance(inner, BatchCounts) and experts.counted:
                inner.reduce = _SumOver(mesh, experts.counted)
            if isinstance(inner, SampleCounts):
                inner.num_parts = plan.mesh.size(*plan.mesh.view("cp"))
                inner.reduce = _SumOver(mesh, experts.sample_counted)


def _shard_layer(block: nn.Module, mesh: DeviceMesh, plan: RunPlan, kind: Kind, layer: ExpertLayer) -> None:
    dims = [axes for axes in (layer.axes, plan.mesh.view("tp")) if axes]
    expert_mesh = joined_mesh(mesh, dims)
    module = block.get_submodule(layer.experts)
    for parameter in kind.parameters:
        owner, _, name = parameter.name.rpartition(".")
        if owner == layer.experts:
            by_axes = {shard.axes: Shard(shard.dim) for shard in parameter.used}
            shard_parameter(module, name, expert_mesh, [by_axes.get(axes, Replicate()) for axes in dims])
    compute_on_local_shards(module)
    group = expert_mesh.get_group(0)
    setattr(block.get_submodule(layer.module), "dispatcher", AllToAllDispatcher(layer.num_experts, group))  # noqa: B010


class _SumOver:
    """Sum of counts over the ranks along some axes."""

    def __init__(self, mesh: DeviceMesh, axes: Atoms) -> None:
        self._groups = [mesh.get_group(axis) for axis in axes]

    def __call__(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        for group in self._groups:
            all_reduce_sum(total, group=group)
        return total
