"""Expert parallelism: each rank of the view `ep` holds some experts of a layer, and tokens travel to them.

Every rank keeps its own samples and all other parameters. The ranks of `ep` are inside `dp_shard × cp`, so an expert's
gradient is the sum over all tokens sent to it, reduced over the ranks that hold the same experts: no factor of ep.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from meshwright.comm.collectives import all_reduce_sum
from meshwright.nn.experts.balance import BatchCounts, SampleCounts
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from meshwright.parallel.local_shards import compute_on_local_shards, shard_parameter
from meshwright.parallel.private import joined_mesh
from meshwright.plan.block_layers import ExpertLayer
from meshwright.plan.mesh_views import Atoms
from meshwright.plan.run_plan import Kind, RunPlan, Stage


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
