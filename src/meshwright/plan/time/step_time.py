"""Prediction of a step's time, by what the time goes to. Doesn't import torch.

Stages are priced per micro-batch (`stage_times`), the schedule is simulated with them and with its transfers, and what
comes after the last backward is added: reductions that nothing hid, sums, the optimizer's update, the host's work per
step. Processes that share a CPU's cores slow each other, the more of them compute at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.performance import Performance
from meshwright.cluster.stacks import MESHWRIGHT, Stack
from meshwright.errors import ConfigError
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.simulate import Costs, EdgeCosts, Simulation, StageCosts, simulate
from meshwright.pipeline.timeline import Timeline
from meshwright.plan.run_plan import BYTES, ContextMethod, LayerSpec, Parameter, RunPlan, Stage
from meshwright.plan.stage_sizes import counted_parameters
from meshwright.plan.time.communication import Communication, Times, added
from meshwright.plan.time.kernel_times import KernelTimes, product_curve, residuals
from meshwright.plan.time.stage_times import StagePricer, StageTimes
from meshwright.plan.traffic import moves_matrices

TINY_US = 1e-3


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step in µs."""

    total: float
    low: float
    """Lower end of the interval of one standard deviation, from the residuals of the cluster's performance."""
    high: float
    parts: Mapping[str, float] = field(hash=False)
    """By part, of the slowest rank, so that they add up to the total: those of `StageTimes`, `bubble`, `cores`, in
    which processes wait for those that they share, `optimizer`, and `step`, the host's work per step."""
    place: int
    """Place of that rank in the pipeline."""
    at_end: tuple[Mapping[str, float], ...] = field(hash=False)
    """What follows the last backward, by place in the pipeline and part."""
    stages: tuple[StageTimes, ...] = field(hash=False)
    timeline: Timeline = field(hash=False)
    """Actions of the first rank of each place of the pipeline, in µs."""
    flops: float = 0.0
    """Operations of a rank in a step that belong to the model, i.e. without recomputation."""
    tokens: int = 0
    """Tokens of a step over all ranks."""

    def tokens_per_s(self, num_ranks: int) -> float:
        """Return the tokens per second and device."""
        return self.tokens / self.total * 1e6 / num_ranks


def predict_step(
    plan: RunPlan,
    cluster: Cluster,
    *,
    stack: Stack = MESHWRIGHT,
    captured: bool = False,
    microbatches: int | None = None,
    steady: tuple[int, int] = (0, 1),
) -> StepTime:
    """Predict the time of a training step.

    Args:
        plan: plan of the run.
        cluster: cluster with a performance.
        stack: the software that trains.
        captured: whether blocks are replayed as CUDA graphs (`capture.scope=layer`), so that the host launches none.
        microbatches: those of the step, if the plan has only some of them; a pipeline's steady state repeats.
        steady: two micro-batches that the first stage starts in that state, from whose distance the others follow.

    Raises:
        ConfigError: the family doesn't describe its operators, or the cluster has no rate of a dtype.
    """
    _check(plan)
    performance, sent = cluster.performance, Communication(plan, cluster)
    pricer = stage_pricer(plan, cluster, sent, stack=stack, captured=captured, microbatches=microbatches)
    stages = tuple(pricer.times(number) for number in range(len(plan.stages)))
    found = simulate(plan.schedule, Costs(*_costs(stages, sent, performance.host.action_us)))
    span = _on_shared_cores(cluster, sent, found, stages)
    ends = [at_end(plan, cluster, sent, place, stages) for place in range(plan.schedule.num_ranks)]
    number, simulated = microbatches or plan.batch.num_microbatches, plan.batch.num_microbatches
    later = (number - simulated) * _period(found, *steady) if number > simulated else 0.0
    ratio = number / simulated
    lasts = [end + later for end in _last_ends(found)]
    # A rank whose backwards end early reduces its gradients while others still have some.
    slowest = max(range(len(ends)), key=lambda place: lasts[place] + sum(ends[place].values()))
    own = [stages[number] for number in plan.schedule.stages_of(slowest)]
    busy = ratio * found.busy[slowest]
    each = [{name: number * us for name, us in stage.parts.items()} for stage in own]
    actions = busy - number * sum(stage.per_microbatch for stage in own)
    waits = {"bubble": lasts[slowest] - busy, "cores": ratio * (span - found.makespan)}
    parts = added(ends[slowest], *each, {"host": actions}, waits)
    total = lasts[slowest] + waits["cores"] + sum(ends[slowest].values())
    deviation = _deviation(plan, performance, parts)
    return StepTime(
        total=total,
        low=total * math.exp(-deviation),
        high=total * math.exp(deviation),
        parts={name: us for name, us in parts.items() if abs(us) > TINY_US},
        place=slowest,
        at_end=tuple(ends),
        stages=stages,
        timeline=found.timeline,
        flops=number * max(sum(stages[n].flops for n in plan.schedule.stages_of(p)) for p in range(len(ends))),
        tokens=round(ratio * plan.batch.global_batch * plan.batch.tokens),
    )


def _period(found: Simulation, first: int, last: int) -> float:
    """Return the mean time between two micro-batches' forwards on the first stage, and not less than a rank's work."""
    forwards = (one for one in found.timeline.spans if one.action.kind is ActionKind.FORWARD and not one.action.stage)
    starts = {one.action.microbatch: one.start for one in forwards}
    return max((starts[last] - starts[first]) / (last - first), max(found.busy) / len(starts))


def _last_ends(found: Simulation) -> list[float]:
    """Return when each rank's last action has ended."""
    lasts = [0.0] * found.timeline.num_ranks
    for span in found.timeline.spans:
        lasts[span.rank] = max(lasts[span.rank], span.end)
    return lasts


def stage_pricer(
    plan: RunPlan,
    cluster: Cluster,
    sent: Communication | None = None,
    *,
    stack: Stack = MESHWRIGHT,
    captured: bool = False,
    microbatches: int | None = None,
) -> StagePricer:
    """Return the prices of a plan's stages on a cluster, in a step of as many micro-batches, by default the plan's."""
    sent, performance = sent or Communication(plan, cluster), cluster.performance
    kernels = KernelTimes(cluster.device, performance, _on_ring(stack, plan), processes=sent.processes)
    return StagePricer(
        plan, kernels, sent, performance, stack, captured=captured, processes=sent.processes, microbatches=microbatches
    )  # fmt: skip


def _on_ring(stack: Stack, plan: RunPlan) -> Stack:
    """Return a stack whose attention is as slow as on the plan's ring."""
    layers = (kind.attention for kind in plan.kinds if kind.attention is not None)
    rings = [plan.mesh.size(*one.axes) for one in layers if one.method is ContextMethod.RING]
    slower = 1 + stack.slower_ring * (max(rings, default=1) - 1)
    return replace(stack, slower_attention=stack.slower_attention * slower)


def _check(plan: RunPlan) -> None:
    unknown = next((kind for kind in plan.kinds if kind.is_block and not kind.operators), None)
    if unknown is not None:
        what = f"the operators of {unknown.name} are unknown"
        rule = "a step has a time if the family describes the operators of its blocks (KindFacts.operators)"
        raise ConfigError(what, rule=rule, fix="describe them, or plan without --cluster")


def _costs(
    stages: tuple[StageTimes, ...], sent: Communication, action_us: float
) -> tuple[list[StageCosts], list[EdgeCosts]]:
    """Return the costs of stages and of transfers between them; a lone stage has no schedule to follow."""
    action_us = action_us if len(stages) > 1 else 0.0
    costs = [
        StageCosts(
            forward=one.forward + action_us,
            backward_input=one.backward_input + action_us,
            backward_weight=one.backward_weight,
            recompute=one.recompute,
        )
        for one in stages
    ]
    edges = [sent.edge(number) for number in range(len(stages) - 1)]
    found = [EdgeCosts(latency, num_bytes, bytes_per_us) for latency, bytes_per_us, num_bytes in edges]
    return costs, found or [EdgeCosts()]


def _on_shared_cores(cluster: Cluster, sent: Communication, found: Simulation, stages: tuple[StageTimes, ...]) -> float:
    """Return the makespan where a node's ranks share a CPU's cores: the more places of the pipeline compute at a time,
    the slower each of them is."""
    if not cluster.performance.cores or found.timeline.num_ranks == 1:
        return found.makespan
    mix = added(*(stage.parts for stage in stages))
    events = sorted(
        [(span.start, 1) for span in found.timeline.spans] + [(span.end, -1) for span in found.timeline.spans]
    )
    alone, total, active = _mean_slower(cluster, mix, sent.processes), 0.0, 0
    for (begin, change), (end, _) in pairwise(events):
        active += change
        slower = _mean_slower(cluster, mix, active * sent.processes) / alone if active else 1.0
        total += (end - begin) * slower
    return total + found.makespan - found.timeline.makespan


def _mean_slower(cluster: Cluster, parts: Times, processes: float) -> float:
    """Return how much slower parts of the work are while so many processes share the cores, in the mean."""
    known = {name: parts.get(name, 0.0) for name in ("products", "attention", "memory", "host")}
    known["products"] += parts.get("recompute", 0.0)
    slower = sum(us * cluster.performance.slower(name, processes) for name, us in known.items())
    return slower / max(sum(known.values()), TINY_US)


def at_end(plan: RunPlan, cluster: Cluster, sent: Communication, place: int, stages: tuple[StageTimes, ...]) -> Times:
    """Return what a rank does after its last backward, by part."""
    performance, numbers = cluster.performance, plan.schedule.stages_of(place)
    held = [plan.stages[number] for number in numbers]
    rank = place * (plan.mesh.num_ranks() // plan.mesh.size("pp"))
    moved, updated = 0, 0
    for stage in held:
        for kind, one, number in counted_parameters(plan, stage):
            size = _update_bytes(plan, stage, kind, one)
            moved, updated = moved + number * size, updated + number * (size > 0)
    processes = sent.processes * plan.schedule.num_ranks
    optimizer = update_us(cluster, moved, updated, processes=processes)
    optimizer += performance.slower("products", processes) * _whole_updates(plan, performance, place)
    own = {"optimizer": optimizer, "step": performance.slower("host", processes) * performance.host.step_us}
    return added(sent.at_end(rank, held), *(stages[number].at_end for number in numbers), own)


def update_us(cluster: Cluster, moved_bytes: float, num_parameters: float, *, processes: float = 1) -> float:
    """Return the time of the norm and the update of a rank's parameters: of their bytes, and of the host that launches
    a kernel for each, while so many processes share a CPU's cores."""
    performance = cluster.performance
    efficiency = performance.update_efficiency or performance.memory_efficiency
    bandwidth = cluster.device.memory_bandwidth_bytes_per_s * efficiency / 1e6
    updates = performance.slower("memory", processes) * moved_bytes / bandwidth
    host = performance.slower("host", processes) * num_parameters * performance.host.parameter_us
    return max(updates, host) if performance.is_async else updates + host


def _whole_updates(plan: RunPlan, performance: Performance, place: int) -> float:
    """Return the time of the products of updates that need whole matrices, on the rank that owns the most."""
    if not moves_matrices(plan):
        return 0.0
    from meshwright.plan.matrix_owners import operations_by_owner  # only for updates from whole matrices

    most = max(operations_by_owner(plan, place).values(), default=0)
    return most / product_curve(performance, plan.optimizer.moved).flops_per_s * 1e6


def _update_bytes(plan: RunPlan, stage: Stage, kind: LayerSpec, parameter: Parameter) -> int:
    """Return the bytes that a parameter's update moves on a rank. The update reads parameter, gradient and states, and
    writes all but the gradient; the norm reads the gradient, and clipping reads and writes it."""
    if not parameter.trained:
        return 0
    size = plan.elements(parameter, sharded=plan.unit_of(stage, kind, parameter).sharded)
    states = (one for one in plan.optimizer.update_of(parameter.role).states if one.dims != ())
    return size * (6 * BYTES[plan.masters] + 2 * sum(BYTES[one.dtype] for one in states))


def _deviation(plan: RunPlan, performance: Performance, parts: Mapping[str, float]) -> float:
    """Return the standard deviation of the logarithm of the time, from the residuals of its parts: those of one part
    err together, those of different parts don't. Idle time scales with the work of others."""
    known = residuals(performance, (one.rate for kind in plan.kinds for one in kind.operators))
    known |= {"optimizer": performance.memory_residual, "step": performance.host.residual}
    known["recompute"] = known["products"]
    links = max((one.residual for one in performance.links.values()), default=0.0)
    work = {name: us for name, us in parts.items() if name not in ("bubble", "cores")}
    variance = sum((us * known.get(name, links)) ** 2 for name, us in work.items())
    whole = performance.residual if plan.mesh.num_ranks() == 1 else performance.group_residual
    return math.hypot(math.sqrt(variance) / max(sum(work.values()), TINY_US), whole)
