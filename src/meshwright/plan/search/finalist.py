"""Finalists of a search: layouts that are planned and simulated as a run would be.

A pipeline's steady state repeats, so the table of a step with many micro-batches is simulated with fewer of them, and
each further micro-batch takes as long as those of that state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.cluster.hardware import Cluster
from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import MemoryEstimate, predict_memory
from meshwright.plan.rules import violations
from meshwright.plan.search.layout import Layout
from meshwright.plan.search.price import Pricer
from meshwright.plan.time.step_time import StepTime, predict_step
from meshwright.units import format_bytes

STEADY = {"1f1b": (1, 1.5), "zb-h1": (1, 1.5), "v-half": (1.5, 2), "v-min": (1.5, 2), "interleaved": (2, 3)}
"""Micro-batches per pipeline rank between which a schedule is steady; others take `LATE`."""
LATE = 2, 2.5


@dataclass(frozen=True)
class Finalist:
    """A layout with what was simulated."""

    layout: Layout
    config: RunConfig
    step: StepTime
    memory: MemoryEstimate
    num_bytes: float


def finalist(base: RunConfig, cluster: Cluster, layout: Layout, pricer: Pricer) -> Finalist:
    """Plan a layout as a run would, and predict its step and memory.

    Raises:
        MeshwrightError: it violates a rule, or doesn't fit.
    """
    config = layout.configured(base)
    first, last = (math.ceil(layout.pp * one) for one in STEADY.get(layout.schedule, LATE))
    number, round_size = layout.num_microbatches, layout.pp if layout.schedule == "interleaved" else 1
    if layout.pp > 1 and number % round_size == 0:
        number = min(number, last + round_size)  # a round after the steady state empties the pipeline
    batch = layout.data_parallel * layout.inner.samples * number
    fewer = config.with_keys({"train.num_microbatches": number, "train.global_batch": batch})
    plan = make_plan(fewer, nodes=cluster.devices_per_node, checked=False)
    if (broken := next(violations(fewer, None), None)) is not None:
        raise broken.kind(broken.what, where=broken.key, rule=broken.rule)
    memory = predict_cuda_memory(plan) if pricer.on_cuda else predict_memory(plan)
    if (size := pricer.total(memory)) > pricer.capacity:
        raise LayoutError(f"{format_bytes(size)} on the fullest rank")
    step = predict_step(plan, cluster, microbatches=layout.num_microbatches, steady=(first, last))
    return Finalist(layout, config, step, memory, size)
