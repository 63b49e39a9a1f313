"""Sizes of what stages hold, derived from the plan: FSDP units, sums of buffer updates at the end of a step and the
order of load counters in the gathered counts, and parameters. Execution and predicted traffic both follow these values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from meshwright.plan.run_plan import Atoms, Buffer, LayerSpec, Parameter, RunPlan, Site, Stage, Unit

ROOT = ("", "root", None)
"""Key of a stage's root unit."""

COUNT_BYTES = 8
"""Size of an exchanged count of tokens per expert."""


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


def counted_parameters(plan: RunPlan, stage: Stage) -> Iterator[tuple[LayerSpec, Parameter, int]]:
    """Yield kind and parameter for each parameter of a stage's kinds, and how many layers have it."""
    for name, number in Counter((*stage.before, *stage.kinds, *stage.after)).items():
        yield from ((plan.kind(name), parameter, number) for parameter in plan.kind(name).parameters)


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


INTEGERS = ("int64", "int32", "uint8")
"""Dtypes whose sums don't depend on the order of addition."""
LOAD_DTYPE = "int64"
"""Dtype of load counters."""


@dataclass(frozen=True)
class BufferSum:
    """One all-reduce per axis of the concatenated updates of several buffers."""

    axes: Atoms
    dtype: str
    elements: int
    """Number of elements of all buffers."""
    buffers: tuple[Site, ...]
    """Stage and full-model name of each buffer, in the order of concatenation."""


@dataclass(frozen=True)
class LoadRow:
    """A load counter of the model; the rows of all stages form a run's expert counts."""

    site: Site
    """First stage with the counter, and its full-model name."""
    layer: int | None
    """Block with the counter; None in an end."""
    num_experts: int


def buffer_sums(plan: RunPlan, rank: int) -> tuple[BufferSum, ...]:
    """Return the sums of buffer updates over the ranks of this rank's stages.

    Integer buffers with the same axes and dtype share a sum. Floating-point buffers are summed one by one: a ring
    starts each part of a tensor at another rank, so their rounding would depend on their position in a longer tensor.
    """
    found: dict[object, BufferSum] = {}
    for number in plan.stages_of(rank):
        for site, _, buffer in _placed(plan, number):
            if buffer.summed:
                key = (buffer.summed, buffer.dtype, None if buffer.dtype in INTEGERS else site)
                earlier = found.get(key, BufferSum(buffer.summed, buffer.dtype, 0, ()))
                elements = earlier.elements + prod(buffer.shape)
                found[key] = BufferSum(buffer.summed, buffer.dtype, elements, (*earlier.buffers, site))
    return tuple(found.values())


def load_rows(plan: RunPlan) -> tuple[LoadRow, ...]:
    """Return the load counters of all stages in model order, those of ends on several stages once."""
    rows: dict[str, LoadRow] = {}
    for number in range(len(plan.stages)):
        for site, layer, buffer in _placed(plan, number):
            if buffer.load:
                rows.setdefault(site[1], LoadRow(site, layer, prod(buffer.shape)))
    return tuple(rows.values())


def experts_per_layer(rows: tuple[LoadRow, ...]) -> dict[str, int]:
    """Return the number of experts by label: the layer, or the full-model name if a layer has several counters."""
    per_layer = Counter(row.layer for row in rows)
    return {
        row.site[1].removesuffix(".value")
        if row.layer is None or per_layer[row.layer] > 1
        else f"layer {row.layer}": row.num_experts
        for row in rows
    }


def _placed(plan: RunPlan, number: int) -> Iterator[tuple[Site, int | None, Buffer]]:
    """Yield the site, layer and description of each buffer of a stage, in module order."""
    for kind, layer in plan.held(plan.stages[number]):
        for buffer in kind.buffers:
            yield (number, kind.full_name(buffer.name, layer)), layer, buffer


MOSTLY = 0.9
"""Share of the parameters that tp shards at least, unless it's said."""


def num_params(plan: RunPlan, *, sharded_over: Collection[str] | None = None, trained: bool = False) -> int:
    """Return the number of the model's parameters, or of those sharded over these atoms or trained; shared ones count
    once."""
    sizes = {
        kind.key(parameter, layer): math.prod(parameter.shape)
        for stage in plan.stages
        for kind, layer, parameter in plan.parameters(stage)
        if sharded_over is None or any(set(shard.axes) & set(sharded_over) for shard in parameter.used)
        if parameter.trained or not trained
    }
    return sum(sizes.values())


def replicated_note(plan: RunPlan) -> tuple[str, ...]:
    """Return a line if tp leaves more than norms and biases replicated, of which a proof says nothing about shards."""
    tp = plan.mesh.view("tp")
    share = num_params(plan, sharded_over=tp) / num_params(plan)
    text = f"tp shards {100 * share:.0f} % of the parameters, and the rest is replicated"
    return (text,) if tp and share < MOSTLY else ()
