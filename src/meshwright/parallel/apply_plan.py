"""Lay a stage's plain module on a mesh as the plan says: tensor parallel, recomputation, compilation, FSDP units.

The order matters: a recomputed block keeps its names and hooks, a graph holds exactly one block with its recomputation,
and FSDP2 shards what tensor parallel left on each rank and hangs its hooks on what is compiled.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.mesh.process_groups import submesh
from meshwright.models.contract.build_module import tie_parameters
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.nn.recompute import recompute
from meshwright.parallel.data_parallel import apply_units
from meshwright.parallel.tensor_parallel import apply_styles, await_lookups
from meshwright.plan.run_plan import RunPlan, Stage


def needs_mesh(plan: RunPlan) -> bool:
    """Whether a plan needs a device mesh: one rank does only for FSDP2's mixed precision."""
    return plan.mesh.num_ranks() > 1 or plan.has_units


def apply_plan(module: nn.Module, mesh: DeviceMesh | None, plan: RunPlan, stage: Stage, facts: ModelFacts) -> None:
    """Lay the module of a stage, still on the meta device, on `mesh` in place.

    Args:
        module: as the family built it.
        mesh: the mesh of all axes; None where `needs_mesh` says that none is needed.
        plan: of the run.
        stage: of the plan.
        facts: of the model, for what is tied.
    """
    if mesh is not None and plan.mesh.view("tp"):
        apply_styles(module, submesh(mesh, ["tp"]), plan, stage)
        tie_parameters(module, facts)
    blocks = [
        (kind, module.get_submodule(kind.full_name("", layer))) for kind, layer in plan.held(stage) if kind.is_block
    ]
    if mesh is not None and plan.mesh.view("tp") and (not blocks or any(kind.compiled for kind, _ in blocks)):
        await_lookups(module, plan, stage)
    for kind, block in blocks:
        if kind.recompute == "full":
            recompute(block)
        if kind.compiled:
            block.compile()
    if mesh is not None and plan.has_units:
        apply_units(module, mesh, plan, stage)
