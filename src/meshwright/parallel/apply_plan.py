"""Parallelize a stage's plain module as planned: expert and context parallelism, features, tensor parallelism,
recomputation, compilation, FSDP units.

The order matters: features' layers get the hooks of tensor parallelism, recomputation preserves a block's names and
hooks, a compiled graph contains exactly one block and its recomputation, and FSDP2 shards the tensor-parallel shards
and installs its hooks on the compiled modules.

Then check that FSDP2 and DTensor did so; a mismatch ends the run. Meshwright's own code follows the plan by
construction. These checks cover PyTorch's decisions: the parameters of each unit and when they are resharded, each
parameter's placements, and the axes over which unreduced gradients are partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from meshwright.errors import LayoutError
from meshwright.features.registry import run_features
from meshwright.mesh.process_groups import submesh
from meshwright.models.contract.build_module import tie_parameters
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.parallel.data_parallel import apply_units, fsdp_modules
from meshwright.parallel.private import JOINED, unit_info, unsharded_parameters
from meshwright.parallel.private import compile_seconds as compile_seconds
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.run_plan import GradientPlacement, RunPlan, Stage, Unit
from meshwright.plan.serialize import REGENERATE_FIX


def needs_mesh(plan: RunPlan) -> bool:
    """Return True if a plan needs a device mesh; a single rank needs one only for FSDP2's mixed precision."""
    return plan.mesh.num_ranks() > 1 or plan.has_units


def apply_plan(module: nn.Module, mesh: DeviceMesh | None, plan: RunPlan, stage: Stage, facts: ModelFacts) -> None:
    """Parallelize the module of a stage in place, while it is on the meta device; without mesh if none is needed.

    Facts of the model restore tied weights.
    """
    held = list(plan.held(stage))
    if mesh is not None and any(kind.experts is not None for kind, _ in held):
        from meshwright.parallel.expert_dispatch import apply_experts

        apply_experts(module, mesh, plan, stage)
    if mesh is not None and plan.mesh.view("cp"):
        from meshwright.parallel.context_attention import apply_context

        apply_context(module, mesh, plan, stage)
    parts = [(kind, module.get_submodule(kind.full_name("", layer))) for kind, layer in held]
    blocks, features = [(kind, block) for kind, block in parts if kind.is_block], run_features(plan).values()
    for kind, part in parts:
        for feature in features:
            feature.before_styles(part, kind)
    if mesh is not None and plan.mesh.view("tp"):
        from meshwright.parallel.tensor_parallel import apply_styles, wait_for_embeddings

        apply_styles(module, submesh(mesh, ["tp"]), plan, stage)
        tie_parameters(module, facts)
        if not blocks or any(kind.compiled for kind, _ in blocks):
            wait_for_embeddings(module, plan, stage)
    for kind, block in blocks:
        policy = RecomputePolicy(kind.recompute)
        if policy is not RecomputePolicy.NONE:
            from meshwright.nn.recompute import recompute

            recompute(block, policy)
        if kind.compiled:
            compile_block(block)
    if mesh is not None and plan.has_units:
        apply_units(module, mesh, plan, stage)


def compile_block(block: nn.Module, **options: Any) -> None:
    """Compile a block in place, but for modules in it that run eagerly; options are those of `torch.compile`."""
    for inner in block.modules():
        if getattr(inner, "runs_eagerly", False):  # not a decorator of theirs, which would import Dynamo in every run
            inner.forward = torch.compiler.disable(inner.forward)  # type: ignore[no-untyped-call]
    block.compile(**options)


RULE = "a run follows its plan"
SEEN = "seen"


def check_placements(part: StagePart) -> None:
    """Check that a stage wrapped by FSDP2 has the planned parameter placements and FSDP units.

    Raises:
        LayoutError: the module does not match the plan; the error names both sides.
    """
    plan, stage = part.plan, part.stage
    for kind, layer, parameter in plan.parameters(stage):
        name = kind.full_name(parameter.name, layer)
        planned = {(shard.dim, axis) for shard in parameter.used for axis in shard.axes}
        stored = plan.unit_of(stage, kind, parameter).sharded if plan.has_units else ()
        planned |= {(parameter.stored_dim, axis) for axis in stored}
        actual = _sharded_axes(part.module.get_parameter(name))
        if actual != planned:
            raise _mismatch(f"{name} is sharded over {_describe(actual)}", f"over {_describe(planned)}", part)
    if plan.has_units:
        _check_units(part)


def _check_units(part: StagePart) -> None:
    for path, unit, names in _units(part):
        module = part.module.get_submodule(path)
        info = unit_info(module) if isinstance(module, FSDPModule) else None
        where = path or "the stage's root"
        if info is None:
            if names:
                raise _mismatch(f"FSDP2 has no unit for {where}", f"one with {', '.join(names)}", part)
            continue
        members, freed = info
        actual = {name for name, parameter in part.module.named_parameters() if parameter in members}
        if actual != set(names):
            name = sorted(actual ^ set(names))[0]
            has = "contains" if name in actual else "lacks"
            raise _mismatch(f"FSDP2's unit for {where} {has} {name}", "otherwise", part)
        if freed != unit.freed and path:
            raise _mismatch(f"FSDP2 has reshard_after_forward={freed} for {where}", str(unit.freed), part)


def _units(part: StagePart) -> Iterator[tuple[str, Unit, list[str]]]:
    """Yield each unit with the path of its first module and its parameters' names in the stage."""
    plan, stage = part.plan, part.stage
    root = set(stage.root.parameters)
    for kind, layer in plan.held(stage):
        for unit in kind.units:
            names = [kind.full_name(name, layer) for name in unit.parameters]
            yield kind.full_name(unit.modules[0], layer), unit, names
    root_names = [
        kind.full_name(parameter.name, layer)
        for kind, layer, parameter in plan.parameters(stage)
        if f"{kind.name}/{parameter.name}" in root
    ]
    yield "", stage.root, root_names


class FirstGradientCheck:
    """Check of the placements of a stage's gradients in the first step, before they are reduced."""

    def __init__(self, part: StagePart) -> None:
        self._part = part
        self._partial_axes: dict[str, set[str]] = {}
        """Axes over which a gradient was partial, by name in the stage; `SEEN` marks that there was a gradient."""
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Start recording gradients as autograd accumulates them; call after the first forward."""
        if self._handles or not self._part.plan.mesh.view("tp"):
            return
        units = fsdp_modules(self._part.module)
        unsharded = {sharded: full for unit in units for sharded, full in unsharded_parameters(unit)}
        for name, parameter in self._part.module.named_parameters():
            # If a unit isn't resharded after its forward, the module's parameters are already the unsharded ones.
            watched: Any = unsharded.get(parameter, parameter)
            if parameter.requires_grad:
                axes = self._partial_axes.setdefault(name, set())
                self._handles.append(watched.register_post_accumulate_grad_hook(_record_partial_axes(axes)))

    def check(self) -> None:
        """Check that exactly the planned gradients were partial over the TP axes; call after the last backward.

        Raises:
            LayoutError: the module does not match the plan; the error names both sides.
        """
        for handle in self._handles:
            handle.remove()
        watched, self._handles = bool(self._handles), []
        if not watched:
            return
        plan = self._part.plan
        for kind, layer, parameter in plan.parameters(self._part.stage):
            recorded = self._partial_axes.get(kind.full_name(parameter.name, layer), set())
            if not parameter.trained or not recorded:
                continue
            tp = plan.mesh.view("tp")
            actual = recorded - {SEEN}
            planned = {axis for axis in tp if parameter.gradient(axis) is GradientPlacement.PARTIAL}
            if actual != planned:
                name = kind.full_name(parameter.name, layer)
                axes = " and ".join(tp)
                text = {True: f"partial over {axes}", False: f"not partial over {axes}"}
                raise _mismatch(
                    f"DTensor's gradient of {name} is {text[bool(actual)]}", text[bool(planned)], self._part
                )


def _record_partial_axes(axes: set[str]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return  # deferred: autograd runs the hook all the same
        axes.add(SEEN)
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            axes.update(name for name, p in zip(names, gradient.placements, strict=True) if p.is_partial())

    return hook


def _sharded_axes(parameter: Tensor) -> set[tuple[int, str]]:
    """Return the dims and axes that a parameter is sharded over, except axes of size 1."""
    if not isinstance(parameter, DTensor):
        return set()
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    shards = [(name, p.dim) for name, p in zip(names, parameter.placements, strict=True) if hasattr(p, "dim")]
    return {(dim, axis) for name, dim in shards if mesh[name].size() > 1 for axis in name.split(JOINED)}


def _describe(shards: set[tuple[int, str]]) -> str:
    return ", ".join(f"{axis} along dim {dim}" for dim, axis in sorted(shards)) or "nothing"


def _mismatch(actual: str, planned: str, part: StagePart) -> LayoutError:
    return LayoutError(
        f"{actual}, but the plan says {planned}",
        where=f"stage {part.number}",
        rule=RULE,
        fix=f"{REGENERATE_FIX}, with this version of Meshwright and PyTorch",
    )
