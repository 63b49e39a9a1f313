"""Sizes of the FSDP units of a stage, and when they are gathered and freed: a fold over the plan."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plan.run_plan import Kind, Parameter, RunPlan, Stage, Unit


@dataclass(frozen=True)
class UnitSizes:
    """An FSDP unit of a stage; blocks have one per layer."""

    unit: Unit
    num_elements: int
    """Elements of a rank's shard, as gathered: FSDP2 pads each parameter to the same number of rows on all ranks."""
    num_trained: int
    """Elements of these whose gradients are reduced."""
    has_backward: bool = True
    """The backward reaches the unit: a parameter in it or before it is trained."""
    has_input_gradient: bool = True
    """The unit computes input gradients, so it is freed after its own backward rather than after the stage's."""

    @property
    def is_freed(self) -> bool:
        """The unit is resharded after its forward and gathered again for its backward."""
        return bool(self.unit.freed)


def unit_sizes(plan: RunPlan, stage: Stage) -> list[UnitSizes]:
    """Return the sizes of a stage's units in the order in which their forwards end; the root comes last."""
    is_first = stage is plan.stages[0]
    members: dict[tuple[str, str, int | None], list[tuple[int, Parameter]]] = {}
    units: dict[tuple[str, str, int | None], Unit] = {}
    trained: list[bool] = []
    for position, (kind, layer, parameter) in enumerate(plan.parameters(stage)):
        unit = _unit_of(stage, kind, parameter)
        key = ("", "root", None) if unit is stage.root else (kind.name, unit.name, layer)
        units[key] = unit
        members.setdefault(key, []).append((position, parameter))
        trained.append(parameter.trained)
    found = []
    for key in sorted(members, key=lambda key: key == ("", "root", None)):  # a stable sort keeps module order
        own, unit = members[key], units[key]
        is_root = unit is stage.root
        sizes = [plan.elements(parameter, sharded=unit.sharded) for _, parameter in own]
        has_input_gradient = not is_first or any(trained[: own[0][0]])
        reached = trained if is_root else [parameter.trained for _, parameter in own]
        found.append(
            UnitSizes(
                unit,
                num_elements=sum(sizes),
                num_trained=sum(size for size, (_, one) in zip(sizes, own, strict=True) if one.trained),
                has_backward=has_input_gradient or any(reached),
                has_input_gradient=has_input_gradient and not is_root,
            )
        )
    return found


def _unit_of(stage: Stage, kind: Kind, parameter: Parameter) -> Unit:
    return next((unit for unit in kind.units if parameter.name in unit.parameters), stage.root)
