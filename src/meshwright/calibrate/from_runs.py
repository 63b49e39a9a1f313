"""Recalibration from runs: a cluster's rates are scaled until the parts of their steps take what was measured.

A run can't tell the kernels of its blocks apart, so that all rates of computation are scaled by one factor, those of
communication by another, and so on: the geometric mean over runs of measured over predicted time. What is left of it
over several runs is the new residual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from meshwright.cluster.hardware import Cluster, Level, Link
from meshwright.cluster.performance import LinkCurve, Performance
from meshwright.plan.time.step_time import predict_step
from meshwright.train.report.comparison import MeasuredRun, compare_time

LEAST_SHARE = 0.01
"""Share of a step from which on a part is known well enough."""
COMPUTE, COMMUNICATION, OPTIMIZER, OTHER, BOTH = (
    "forward and backward",
    "exposed communication",
    "optimizer",
    "data and other",
    "computation and communication",
)


@dataclass(frozen=True)
class Factor:
    """Measured over predicted time of a part."""

    mean: float
    deviation: float | None
    """Standard deviation of its logarithm over runs; None of one run."""

    def residual(self, before: float) -> float:
        """Return the residual of rates that are scaled by the factor."""
        return before if self.deviation is None else self.deviation


def factors(cluster: Cluster, runs: Sequence[MeasuredRun]) -> dict[str, Factor]:
    """Return measured over predicted time of each part that is large enough in some run."""
    found: dict[str, list[float]] = {}
    on_cpu = not cluster.performance.is_async
    for run in runs:
        time = predict_step(run.plan, cluster, captured=run.captured)
        *rows, whole = compare_time(time, run.ranks, on_cpu=on_cpu)
        for row in rows:
            shares = row.predicted / whole.predicted, row.measured / whole.measured
            if min(shares) > 0 and max(shares) >= LEAST_SHARE:
                found.setdefault(row.name, []).append(math.log(row.measured / row.predicted))
    return {
        name: Factor(math.exp(fmean(logs)), pstdev(logs) if len(logs) > 1 else None) for name, logs in found.items()
    }


def recalibrated(cluster: Cluster, found: Mapping[str, Factor], *, source: str) -> Cluster:
    """Return the cluster with its rates scaled by the factors of the parts that they make."""
    unchanged = Factor(1.0, None)
    both = found.get(BOTH, unchanged)
    compute, sent = found.get(COMPUTE, both), found.get(COMMUNICATION, both)
    optimizer, other = found.get(OPTIMIZER, unchanged), found.get(OTHER, unchanged)
    before, device = cluster.performance, cluster.device
    bandwidth, share = _scaled(device.memory_bandwidth_bytes_per_s, before.memory_efficiency, compute)
    inside, inside_curve = _link(cluster.inside_node, before, Level.INSIDE_NODE, sent)
    between, between_curve = _link(cluster.between_nodes, before, Level.BETWEEN_NODES, sent)
    pods = cluster.between_pods and _link(cluster.between_pods, before, Level.BETWEEN_PODS, sent)
    curves: dict[str, LinkCurve] = {Level.INSIDE_NODE: inside_curve, Level.BETWEEN_NODES: between_curve}
    host = replace(
        before.host,
        launch_us=before.host.launch_us * compute.mean,
        compiled_launch_us=before.host.compiled_launch_us * compute.mean,
        block_us=before.host.block_us * compute.mean,
        parameter_us=before.host.parameter_us * optimizer.mean,
        step_us=before.host.step_us * other.mean,
    )
    performance = replace(
        before,
        source=source,
        products={
            rate: replace(one, flops_per_s=one.flops_per_s / compute.mean, residual=compute.residual(one.residual))
            for rate, one in before.products.items()
        },
        attention={
            rate: replace(one, flops_per_s=one.flops_per_s / compute.mean, residual=compute.residual(one.residual))
            for rate, one in before.attention.items()
        },
        memory_efficiency=share,
        memory_residual=compute.residual(before.memory_residual),
        host=host,
        links=curves | ({Level.BETWEEN_PODS: pods[1]} if pods else {}),
    )
    return replace(
        cluster,
        device=replace(device, memory_bandwidth_bytes_per_s=bandwidth),
        performance=performance,
        inside_node=inside,
        between_nodes=between,
        between_pods=pods[0] if pods else None,
    )


def _link(link: Link, performance: Performance, level: Level, factor: Factor) -> tuple[Link, LinkCurve]:
    """Return a link, and its curve, whose messages take `factor` times as long."""
    curve = performance.links.get(level) or LinkCurve(link.latency_us)
    bandwidth, share = _scaled(link.bandwidth_bytes_per_s, curve.efficiency, factor)
    scaled = replace(curve, latency_us=curve.latency_us * factor.mean, efficiency=share,
                     residual=factor.residual(curve.residual))  # fmt: skip
    return replace(link, bandwidth_bytes_per_s=bandwidth), scaled


def _scaled(peak: float, share: float, factor: Factor) -> tuple[float, float]:
    """Return a peak rate and the share of it that is achieved, for times that are `factor` times as long; the peak
    rises only if more than all of it was achieved."""
    share /= factor.mean
    return (peak * share, 1.0) if share > 1 else (peak, share)
