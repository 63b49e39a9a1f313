"""Sizes and gather behavior of a stage's FSDP units, derived from the plan."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plan.run_plan import Kind, Parameter, RunPlan, Stage, Unit


@dataclass(frozen=True)
class UnitSizes:
    """Sizes of one FSDP unit of a stage; each block has its own."""

    unit: Unit
    num_elements: int
    """Elements of a rank's shard with FSDP2's padding of each parameter to the same number of rows on all ranks."""
    num_trained: int
    """Number of these elements with gradients to reduce."""
    has_backward: bool = True
    """Whether the backward reaches the unit, i.e. a parameter in or before it is trained."""
    has_input_gradient: bool = True
    """Whether the unit computes input gradients; if so, it is freed after its own backward, else after the stage's."""

    @property
    def is_freed(self) -> bool:
        """Whether the unit is resharded after its forward and gathered again for its backward."""
        return bool(self.unit.freed)


def unit_sizes(plan: RunPlan, stage: Stage) -> list[UnitSizes]:
    """Return the sizes of a stage's units in the order their forwards end; the root comes last."""
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
    for key in sorted(members, key=lambda key: key == ("", "root", None)):  # stable sort: keeps module order
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
