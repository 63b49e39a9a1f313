"""Parallelize a stage's plain module as planned: expert and context parallelism, features, tensor parallelism,
recomputation, compilation, FSDP units.

The order matters: features' layers get the hooks of tensor parallelism, recomputation preserves a block's names and
hooks, a compiled graph contains exactly one block and its recomputation, and FSDP2 shards the tensor-parallel shards
and installs its hooks on the compiled modules.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.features.registry import run_features
from meshwright.mesh.process_groups import submesh
from meshwright.models.contract.build_module import tie_parameters
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.parallel.data_parallel import apply_units
from meshwright.plan.run_plan import RunPlan, Stage


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
    held = list(plan.held(stage))
    if mesh is not None and any(kind.experts is not None for kind, _ in held):
        from meshwright.parallel.expert_dispatch import apply_experts

        apply_experts(module, mesh, plan, stage)
    if mesh is not None and plan.mesh.view("cp"):
        from meshwright.parallel.context.apply import apply_context

        apply_context(module, mesh, plan, stage)
    blocks = [(kind, module.get_submodule(kind.full_name("", layer))) for kind, layer in held if kind.is_block]
    features = run_features(plan).values()
    for kind, block in blocks:
        for feature in features:
            feature.before_styles(block, kind)
    if mesh is not None and plan.mesh.view("tp"):
        from meshwright.parallel.tensor_parallel import apply_styles, wait_for_embeddings

        apply_styles(module, submesh(mesh, ["tp"]), plan, stage)
        tie_parameters(module, facts)
        for kind, block in blocks:
            for feature in features:
                feature.after_styles(block, kind)
        if not blocks or any(kind.compiled for kind, _ in blocks):
            wait_for_embeddings(module, plan, stage)
    for kind, block in blocks:
        policy = RecomputePolicy(kind.recompute)
        if policy is not RecomputePolicy.NONE:
            from meshwright.nn.recompute import recompute

            recompute(block, policy)
        if kind.compiled:
            block.compile()
    if mesh is not None and plan.has_units:
        apply_units(module, mesh, plan, stage)
