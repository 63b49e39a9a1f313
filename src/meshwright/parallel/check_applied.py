"""What FSDP2 and DTensor really made of a stage, compared with the plan: a difference ends the run with both named.

What we do ourselves follows the plan. What PyTorch decides is looked at: which parameters a unit has and when it is
freed, how each parameter is sharded, and over which axes the first gradients are partial before they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from meshwright.errors import LayoutError
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.parallel.private import JOINED, unit_of, unsharded_parameters
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.mesh_views import Atoms
from meshwright.plan.run_plan import GradientPlacement, Kind, Parameter, Unit

RULE = "a run does what its plan says"


def check_placements(part: StagePart) -> None:
    """See that a stage's parameters are sharded, and its units made, as the plan says; after FSDP2 has wrapped it.

    Raises:
        LayoutError: one is not, with both placements.
    """
    plan, stage = part.plan, part.stage
    stored = stage.root.sharded if plan.has_units else ()
    for kind, layer, parameter in plan.parameters(stage):
        name = kind.full_name(parameter.name, layer)
        planned = {(shard.dim, axis) for shard in parameter.used for axis in shard.axes}
        planned |= {(parameter.stored_dim, axis) for axis in stored}
        found = _sharded(part.module.get_parameter(name))
        if found != planned:
            raise _differs(f"{name} is sharded over {_words(found)}", f"over {_words(planned)}", part)
    if plan.has_units:
        _check_units(part)


def _check_units(part: StagePart) -> None:
    for path, unit, names in _units(part):
        module = part.module.get_submodule(path)
        found = unit_of(module) if isinstance(module, FSDPModule) else None
        where = path or "the stage's root"
        if found is None:
            if names:
                raise _differs(f"FSDP2 makes no unit of {where}", f"one with {', '.join(names)}", part)
            continue
        members, freed = found
        own = {name for name, parameter in part.module.named_parameters() if parameter in members}
        if own != set(names):
            other = sorted(own ^ set(names))[0]
            has = "has" if other in own else "lacks"
            raise _differs(f"FSDP2's unit of {where} {has} {other}", "otherwise", part)
        if freed != unit.freed and path:
            raise _differs(f"FSDP2 frees {where} after its forward: {freed}", str(unit.freed), part)


def _units(part: StagePart) -> Iterator[tuple[str, Unit, list[str]]]:
    """Of each unit the path of a module, the unit, and its parameters' names in the stage."""
    plan, stage = part.plan, part.stage
    root = set(stage.root.parameters)
    for kind, layer in plan.held(stage):
        for unit in kind.units:
            names = [kind.full_name(name, layer) for name in unit.parameters]
            yield kind.full_name(unit.modules[0], layer), unit, names
    left = [
        kind.full_name(parameter.name, layer)
        for kind, layer, parameter in plan.parameters(stage)
        if f"{kind.name}/{parameter.name}" in root
    ]
    yield "", stage.root, left


class FirstGradients:
    """The placements of a stage's gradients in its first backwards, before FSDP2 or we reduce them."""

    def __init__(self, part: StagePart) -> None:
        self._part = part
        self._found: dict[str, set[str]] = {}
        """By name in the stage."""
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Look at what autograd accumulates from here on; after the first forward."""
        if self._handles or not self._part.plan.mesh.view("tp"):
            return
        units = fsdp_modules(self._part.module)
        gathered = {sharded: full for one in units for sharded, full in unsharded_parameters(one)}
        for name, parameter in self._part.module.named_parameters():
            # A unit that is kept after its forward has its gathered parameters in the module already.
            watched: Any = gathered.get(parameter, parameter)
            if parameter.requires_grad:
                seen = self._found.setdefault(name, set())
                self._handles.append(watched.register_post_accumulate_grad_hook(_look(seen)))

    def check(self) -> None:
        """See that gradients were partial over tensor parallel where the plan says so; after the last backward.

        Raises:
            LayoutError: one was not, or another was.
        """
        for handle in self._handles:
            handle.remove()
        watched, self._handles = bool(self._handles), []
        if not watched:
            return
        plan = self._part.plan
        for kind, layer, parameter in plan.parameters(self._part.stage):
            found = self._found.get(kind.full_name(parameter.name, layer), set())
            if not parameter.trained or not found:
                continue
            self._compare(kind, layer, parameter, found - {"seen"}, plan.mesh.view("tp"))

    def _compare(self, kind: Kind, layer: int | None, parameter: Parameter, found: set[str], tp: Atoms) -> None:
        planned = {axis for axis in tp if parameter.gradient(axis) is GradientPlacement.PARTIAL}
        if found != planned:
            name = kind.full_name(parameter.name, layer)
            axes = " and ".join(tp)
            said = {True: f"partial over {axes}", False: f"not partial over {axes}"}
            raise _differs(f"DTensor's gradient of {name} is {said[bool(found)]}", said[bool(planned)], self._part)


def _look(seen: set[str]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        seen.add("seen")
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            seen.update(name for name, one in zip(names, gradient.placements, strict=True) if one.is_partial())

    return hook


def _sharded(parameter: Tensor) -> set[tuple[int, str]]:
    """Dims and axes of more than one rank that a parameter is sharded over."""
    if not isinstance(parameter, DTensor):
        return set()
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    placed = [(name, one.dim) for name, one in zip(names, parameter.placements, strict=True) if hasattr(one, "dim")]
    return {(dim, axis) for name, dim in placed if mesh[name].size() > 1 for axis in name.split(JOINED)}


def _words(shards: set[tuple[int, str]]) -> str:
    return ", ".join(f"{axis} along dim {dim}" for dim, axis in sorted(shards)) or "nothing"


def _differs(found: str, planned: str, part: StagePart) -> LayoutError:
    return LayoutError(
        f"{found}, and the plan says {planned}",
        where=f"stage {part.number}",
        rule=RULE,
        fix="a plan that is made again with this version of Meshwright and PyTorch (meshwright plan … -o FILE)",
    )
