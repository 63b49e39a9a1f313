"""Finalists of a search: layouts that are planned and simulated as a run would be.

A pipeline's steady state repeats, so the table of a step with many micro-batches is simulated with fewer of them,
twice, and each further micro-batch takes as long as those by which the two differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.cluster.hardware import Cluster
from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import MemoryEstimate, predict_memory
from meshwright.plan.rules import violations
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.search.layout import Layout
from meshwright.plan.search.price import Pricer
from meshwright.plan.time.communication import added
from meshwright.plan.time.step_time import StepTime, predict_step
from meshwright.units import format_bytes

CYCLES = {"1f1b": (1, 1.5), "zb-h1": (1, 1.5), "v-half": (1.5, 2), "v-min": (1.5, 2), "interleaved": (2, 3)}
"""Micro-batches per pipeline rank of the two simulations, from which on a schedule is steady; others take `LATE`."""
LATE = 2, 2.5
ENOUGH = 2
"""Ratio of a step's micro-batches to those simulated from which on it isn't simulated whole."""


@dataclass(frozen=True)
class Finalist:
    """A layout with what was simulated."""

    layout: Layout
    config: RunConfig
    step: StepTime
    memory: MemoryEstimate
    num_bytes: float
    simulated: int
    """Micro-batches that were simulated."""


def finalist(base: RunConfig, cluster: Cluster, layout: Layout, pricer: Pricer) -> Finalist:
    """Plan a layout as a run would, and predict its step and memory.

    Raises:
        MeshwrightError: it violates a rule, or doesn't fit.
    """
    config = layout.configured(base)
    few, more = (math.ceil(layout.pp * one) for one in CYCLES.get(layout.schedule, LATE))
    fewer = layout.pp > 1 and layout.num_microbatches > ENOUGH * more
    number = more if fewer else layout.num_microbatches
    plan = _planned(config, layout, number, cluster)
    if (broken := next(violations(_with(config, layout, number), None), None)) is not None:
        raise broken.kind(broken.what, where=broken.key, rule=broken.rule)
    memory = predict_cuda_memory(plan) if pricer.on_cuda else predict_memory(plan)
    if (size := pricer.total(memory)) > pricer.capacity:
        raise LayoutError(f"{format_bytes(size)} on the fullest rank")
    step = predict_step(plan, cluster)
    if fewer:
        before = predict_step(_planned(config, layout, few, cluster), cluster)
        step = _extended(before, step, few, number, layout.num_microbatches)
    return Finalist(layout, config, step, memory, size, number)


def _with(config: RunConfig, layout: Layout, number: int) -> RunConfig:
    """Return the configuration of a run with as many micro-batches of the same size."""
    batch = layout.data_parallel * layout.inner.samples * number
    return config.with_keys({"train.num_microbatches": number, "train.global_batch": batch})


def _planned(config: RunConfig, layout: Layout, number: int, cluster: Cluster) -> RunPlan:
    return make_plan(_with(config, layout, number), nodes=cluster.devices_per_node, checked=False)


def _extended(few: StepTime, more: StepTime, at: int, to: int, number: int) -> StepTime:
    """Return the time of a step with `number` micro-batches from those with `at` and `to`."""
    steps = (number - to) / (to - at)

    def extend(less: float, much: float) -> float:
        return much + steps * (much - less)

    total = extend(few.total, more.total)
    names = added(few.parts, more.parts)
    return replace(
        more,
        total=total,
        low=more.low * total / more.total,
        high=more.high * total / more.total,
        parts={name: extend(few.parts.get(name, 0.0), more.parts.get(name, 0.0)) for name in names},
        flops=extend(few.flops, more.flops),
        tokens=round(extend(few.tokens, more.tokens)),
    )
