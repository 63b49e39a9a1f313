"""Context parallelism applied to a stage's module: attention layers exchange keys, values or heads."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.nn.attention.core import AttentionCore
from meshwright.parallel.context.heads import HeadsAttention
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.token_shards import context_group
from meshwright.plan.run_plan import ContextMethod, RunPlan, Stage


def apply_context(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Let the attention layers of a stage's module attend to the tokens of all context-parallel ranks, in place.

    Args:
        module: module of the stage.
        mesh: mesh of all axes.
        plan: plan of the run.
        stage: the stage in `plan`.
    """
    group = context_group(mesh, plan)
    for kind, layer in plan.held(stage):
        if kind.attention is not None:
            attention = module.get_submodule(kind.full_name(kind.attention.module, layer))
            assert isinstance(attention.core, AttentionCore), "`AttentionFacts.module` has a core"
            attention.core = _core(kind.attention.method, group, attention.core)  # type: ignore[assignment]


def _core(method: ContextMethod | None, group: ProcessGroup, core: AttentionCore) -> AttentionCore:
    assert method is not None, "a plan with cp has a method for every attention layer"
    kind = HeadsAttention if method is ContextMethod.HEADS else RingAttention
    return kind(group, backend=core.backend)
