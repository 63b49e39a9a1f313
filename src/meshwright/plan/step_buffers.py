"""All-reduces of buffer updates at the end of a step, and the order of load counters in the gathered counts.

Execution and predicted traffic both follow these values. Doesn't import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from meshwright.plan.mesh_views import Atoms
from meshwright.plan.run_plan import Buffer, RunPlan, Site

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
