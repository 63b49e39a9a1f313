"""Sizes and gather behavior of a stage's FSDP units, derived from the plan."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plan.run_plan import Parameter, RunPlan, Stage, Unit

ROOT = ("", "root", None)
"""Key of a stage's root unit."""


@dataclass(frozen=True)
class UnitSizes:
    """Sizes of one FSDP unit of a stage; each block has its own."""

    unit: Unit
    num_elements: int
    """Elements of a rank's shard including padding; FSDP2 pads each parameter to equal rows on all ranks."""
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
    keyed = [((kind.name, unit.name, layer), unit) for kind, layer in plan.held(stage) for unit in kind.units]
    units: dict[tuple[str, str, int | None], Unit] = {**dict(keyed), ROOT: stage.root}
    members: dict[tuple[str, str, int | None], list[tuple[int, Parameter]]] = {key: [] for key in units}
    trained: list[bool] = []
    for position, (kind, layer, parameter) in enumerate(plan.parameters(stage)):
        unit = plan.unit_of(stage, kind, parameter)
        members[ROOT if unit is stage.root else (kind.name, unit.name, layer)].append((position, parameter))
        trained.append(parameter.trained)
    found = []
    for key, own in members.items():
        if not own:
            continue
        unit = units[key]
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
