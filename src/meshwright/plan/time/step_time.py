"""Prediction of a step's time, by what the time goes to. Doesn't import torch.

Stages are priced per micro-batch (`stage_times`), the schedule is simulated with them and with its transfers, and what
comes after the last backward is added: reductions that nothing hid, sums, the optimizer's update, the host's work per
step. Processes that share a CPU's cores take at least their work over the cores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.cluster.performance import Performance
from meshwright.cluster.presets import Cluster
from meshwright.cluster.stacks import MESHWRIGHT, Stack
from meshwright.errors import ConfigError
from meshwright.pipeline.simulate import Costs, EdgeCosts, StageCosts, simulate
from meshwright.pipeline.timeline import Timeline
from meshwright.plan.run_plan import BYTES, RunPlan
from meshwright.plan.time.communication import Communication
from meshwright.plan.time.kernel_times import KernelTimes, residuals
from meshwright.plan.time.stage_times import StagePricer, StageTimes


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step in µs."""

    total: float
    low: float
    """Lower end of the interval of one standard deviation, from the residuals of the cluster's performance."""
    high: float
    parts: Mapping[str, float] = field(hash=False)
    """By part, of the slowest rank, so that they add up to the total: those of `StageTimes`, and `bubble`,
    `optimizer` and `step`, the host's work per step."""
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
    plan: RunPlan, cluster: Cluster, *, stack: Stack = MESHWRIGHT, captured: bool = False
) -> StepTime:
    """Predict the time of a training step.

    Args:
        plan: plan of the run.
        cluster: cluster with a performance.
        stack: the software that trains.
        captured: whether blocks are replayed as CUDA graphs (`capture.scope=layer`), so that the host launches none.

    Raises:
        ConfigError: the cluster's performance is unknown, or a family doesn't describe its operators.
    """
    performance = _performance(plan, cluster)
    kernels, sent = KernelTimes(cluster.device, performance, stack), Communication(plan, cluster)
    pricer = StagePricer(plan, kernels, sent, performance, stack, captured=captured)
    stages = tuple(pricer.times(number) for number in range(len(plan.stages)))
    actions = performance.host.action_us if len(plan.stages) > 1 else 0.0
    found = simulate(plan.schedule, Costs(*_costs(stages, sent, actions)))
    span, microbatches = _shared_cores(plan, performance, found.makespan, found.busy), plan.batch.num_microbatches
    ends = [at_end(plan, cluster, sent, place, stages) for place in range(plan.schedule.num_ranks)]
    slowest = max(range(len(ends)), key=lambda place: (ends[place].total(), found.busy[place]))
    parts = Counter(ends[slowest])
    for number in plan.schedule.stages_of(slowest):
        for part, us in stages[number].parts.items():
            parts[part] += microbatches * us
    parts["bubble"] += span - found.busy[slowest]
    parts["host"] += found.busy[slowest] - sum(
        microbatches * stages[number].per_microbatch for number in plan.schedule.stages_of(slowest)
    )
    total = span + ends[slowest].total()
    deviation = _deviation(plan, cluster, performance, parts, total)
    return StepTime(
        total=total,
        low=total * math.exp(-deviation),
        high=total * math.exp(deviation),
        parts={name: us for name, us in parts.items() if us},
        stages=stages,
        timeline=found.timeline,
        flops=microbatches * max(sum(stages[n].flops for n in plan.schedule.stages_of(p)) for p in range(len(ends))),
        tokens=plan.batch.global_batch * plan.batch.tokens,
    )


def _performance(plan: RunPlan, cluster: Cluster) -> Performance:
    if cluster.performance is None:
        what = f"what {cluster.name} achieves is unknown"
        raise ConfigError(what, rule="times need a cluster with a performance", fix="meshwright calibrate -o FILE")
    unknown = next((kind for kind in plan.kinds if kind.is_block and not kind.operators), None)
    if unknown is not None:
        what = f"the operators of {unknown.name} are unknown"
        rule = "times need a family that describes its operators (KindFacts.operators)"
        raise ConfigError(what, rule=rule, fix="describe them, or plan without times")
    return cluster.performance


def _costs(
    stages: tuple[StageTimes, ...], sent: Communication, action_us: float
) -> tuple[list[StageCosts], list[EdgeCosts]]:
    """Return the costs of stages and of transfers between them."""
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


def _shared_cores(plan: RunPlan, performance: Performance, makespan: float, busy: tuple[float, ...]) -> float:
    """Return the makespan where all ranks of a node share a CPU's cores: at least their work over the cores."""
    if not performance.cores:
        return makespan
    alike = plan.mesh.num_ranks() // len(busy)
    nodes = len({plan.mesh.node(rank) for rank in range(plan.mesh.num_ranks())})
    return max(makespan, sum(busy) * alike / nodes / performance.cores)


def at_end(
    plan: RunPlan, cluster: Cluster, sent: Communication, place: int, stages: tuple[StageTimes, ...]
) -> Counter[str]:
    """Return what a rank does after its last backward, by part."""
    performance, numbers = _performance(plan, cluster), plan.schedule.stages_of(place)
    rank = place * (plan.mesh.num_ranks() // plan.mesh.size("pp"))
    found = Counter(sent.at_end(rank, [plan.stages[number] for number in numbers]))
    for number in numbers:
        found.update(stages[number].at_end)
    num_bytes = count = 0
    for number in numbers:
        stage = plan.stages[number]
        for kind, layer, parameter in plan.parameters(stage):
            if parameter.trained:
                size = plan.elements(parameter, sharded=plan.unit_of(stage, kind, parameter).sharded)
                states = plan.optimizer.update_of(parameter.role).states
                state = sum(BYTES[one.dtype] for one in states if one.dims != ())
                # The update reads parameter, gradient and states, and writes all but the gradient; the norm reads the
                # gradient, clipping reads and writes it.
                num_bytes += size * (6 * BYTES[plan.masters] + 2 * state)
                count += 1
    bandwidth = cluster.device.memory_bandwidth_bytes_per_s * performance.memory_efficiency / 1e6
    updates = num_bytes / bandwidth
    host = count * performance.host.parameter_us
    found["optimizer"] += max(updates, host) if performance.is_async else updates + host
    found["step"] += performance.host.step_us
    return found


def _deviation(
    plan: RunPlan, cluster: Cluster, performance: Performance, parts: Mapping[str, float], total: float
) -> float:
    """Return the standard deviation of the logarithm of the time, from the residuals of its parts."""
    by_part = residuals(performance, iter({one.rate for kind in plan.kinds for one in kind.operators}))
    by_part |= {"optimizer": performance.memory_residual, "step": performance.host.residual}
    by_part["recompute"] = by_part["products"]
    links = max((one.residual for one in performance.links.values()), default=0.0)
    known = {name: us for name, us in parts.items() if name != "bubble"}
    variance = sum((us * by_part.get(name, links)) ** 2 for name, us in known.items())
    work = sum(known.values())
    # Idle time scales with the work of others.
    return math.sqrt(variance) / work * (1 if work else 0) if work and total else 0.0
