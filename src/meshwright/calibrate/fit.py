"""Fit the curves of `cluster/performance.py` to measured times, on logarithms, so that a time of 1 µs counts as much as
one of 1 s. Each parameter starts at an estimate, from which it departs only as far as measurements ask for it: a prior
decides what no measurement does. A residual is the standard deviation of log(measured / predicted). Doesn't import
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster.collectives import CollectiveOp, GroupShape, collective_us
from meshwright.cluster.hardware import Cluster, Level
from meshwright.cluster.performance import AttentionCurve, HostCosts, LinkCurve, ProductCurve

T = TypeVar("T")
Floats = NDArray[np.float64]

NOISE = 0.05
"""Standard deviation of a time's logarithm that measurements are expected to have."""
WIDE, LOOSE, CLOSE, FIXED = 3.0, 1.0, 0.1, 1e-6
"""Standard deviations of a parameter's logarithm around its estimate: of a guess, of something like it that was
measured, of what was measured itself, and of what is no parameter here."""
ITERATIONS, SLOPE = 40, 1e-3
OVERHEAD_S = 2e-6
CACHED_BYTES = 2.0**20
"""Estimate of what of a tensor stays in a CPU's caches while processes exchange it."""


@dataclass(frozen=True)
class TimedProduct:
    rows: int
    inner: int
    columns: int
    pass_number: int
    """0 in the memory layout of a linear layer's forward, 1 of its input's gradient, 2 of its weight's."""
    seconds: float


@dataclass(frozen=True)
class TimedAttention:
    length: int
    flops: float
    """Operations of the forward on the pairs that a causal mask leaves."""
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class TimedCollective:
    op: CollectiveOp
    num_bytes: int
    num_ranks: int
    seconds: float


@dataclass(frozen=True)
class TimedRun:
    """A run's time per step, and the prediction of it for a cluster."""

    predict_us: Callable[[Cluster], float]
    measured_us: float
    num_ranks: int = 1


@dataclass(frozen=True)
class Fit:
    """Fitted parameters, and how well they fit."""

    values: list[float]
    residual: float
    expected: float
    """Residual of measurements that the fit hasn't seen: each one's, had it been left out."""


def fit_logs(
    predict: Callable[[Floats], Floats], start: Sequence[float], freedom: Sequence[float], measured: Sequence[float]
) -> Fit:
    """Fit positive parameters to times by Gauss–Newton with damped steps (Levenberg and Marquardt).

    Args:
        predict: function from parameters to times.
        start: estimates of the parameters.
        freedom: standard deviation of the logarithm of each.
        measured: the times.
    """
    begin, target = np.array(start, float), np.log(np.array(measured, float))
    prior: Floats = NOISE / np.array(freedom, float)
    logs = np.zeros(len(begin))

    def errors(logs: Floats) -> Floats:
        found = target - np.log(np.maximum(predict(begin * np.exp(logs)), 1e-30))
        return np.concatenate([found, -prior * logs])

    damping, found = 1e-2, errors(logs)
    slopes = _slopes(errors, logs, found)
    for _ in range(ITERATIONS):
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ found)
        other = errors(logs + np.clip(step, -2, 2))
        gain = 1 - float(other @ other) / max(float(found @ found), 1e-30)
        if gain <= 0:
            damping *= 8
            if damping > 1e6:
                break
            continue
        logs, found, damping = logs + np.clip(step, -2, 2), other, damping / 5
        slopes = _slopes(errors, logs, found)
        if gain < 1e-6:
            break
    own = found[: len(target)]
    weights = np.linalg.solve(slopes.T @ slopes, slopes[: len(target)].T)
    leverage = np.einsum("ij,ji->i", slopes[: len(target)], weights)
    left_out = own / np.maximum(1 - leverage, 0.1)
    values = [rounded(float(one)) for one in begin * np.exp(logs)]
    return Fit(values, rounded(float(np.sqrt(np.mean(own**2)))), rounded(float(np.sqrt(np.mean(left_out**2)))))


def _slopes(errors: Callable[[Floats], Floats], logs: Floats, found: Floats) -> Floats:
    return np.column_stack([(errors(logs + SLOPE * unit) - found) / SLOPE for unit in np.eye(len(logs))])


def fit_products(samples: Sequence[TimedProduct]) -> ProductCurve:
    """Fit the rate of products of a dtype, beside a time that each has whatever its shape: that of its launch."""
    sizes = np.array([(one.rows, one.inner, one.columns) for one in samples], float)
    flops, passes = 2 * sizes.prod(axis=1), np.array([one.pass_number for one in samples])
    measured = [one.seconds for one in samples]

    def predict(values: Floats) -> Floats:
        slower = np.array([1.0, *values[5:]])[passes]
        seconds: Floats = values[1] + flops / values[0] * slower * (1 + values[2:5] / sizes).prod(axis=1)
        return seconds

    start = [float((flops / measured).max()), OVERHEAD_S, 8.0, 8.0, 8.0, 1.0, 1.0]
    found = fit_logs(predict, start, [LOOSE, LOOSE, WIDE, WIDE, WIDE, LOOSE, LOOSE], measured)
    rate, _, rows, inner, columns, to_input, to_weight = found.values
    return ProductCurve(rate, rows, inner, columns, to_input, to_weight, found.expected)


def fit_attention(samples: Sequence[TimedAttention]) -> AttentionCurve:
    """Fit the rate of attention of a dtype, and how much slower its backward is."""
    lengths, flops = np.array([one.length for one in samples], float), np.array([one.flops for one in samples])
    seconds = [one.forward_s for one in samples] + [one.backward_s for one in samples]

    def predict(values: Floats) -> Floats:
        forward = flops / values[0] * (1 + values[1] / lengths)
        return np.concatenate([forward, 2.5 * values[2] * forward])

    start = [float((flops / seconds[: len(samples)]).max()), 32.0, 1.0]
    found = fit_logs(predict, start, [LOOSE, WIDE, LOOSE], seconds)
    rate, length, slower = found.values
    return AttentionCurve(rate, length, slower, found.expected)


def fit_link(cluster: Cluster, samples: Sequence[TimedCollective]) -> Cluster:
    """Fit latency and bandwidth of the link inside a node to collectives, by the rules that price them."""
    on_cpu = not cluster.performance.is_async

    def changed(values: Sequence[float]) -> Cluster:
        latency, bandwidth, slower, cached, uncached_slower = map(float, values)
        link = replace(cluster.inside_node, latency_us=latency, bandwidth_bytes_per_s=bandwidth)
        curve = LinkCurve(latency, reduce_scatter_slower=slower)
        if on_cpu:
            curve = replace(curve, cached_bytes=cached, uncached_slower=max(1.0, uncached_slower))
        links = {**cluster.performance.links, Level.INSIDE_NODE: curve}
        return replace(cluster, inside_node=link, performance=replace(cluster.performance, links=links))

    def predict(values: Floats) -> Floats:
        other = changed(values.tolist())
        times = [collective_us(other, one.op, one.num_bytes, GroupShape(one.num_ranks)) for one in samples]
        return np.array(times) / 1e6

    link, curve = cluster.inside_node, cluster.curve(Level.INSIDE_NODE)
    start = [curve.latency_us, link.bandwidth_bytes_per_s, 1.0, CACHED_BYTES, 2.0]
    freedom = [WIDE, WIDE, LOOSE, *((0.3, LOOSE) if on_cpu else (FIXED, FIXED))]
    found = fit_logs(predict, start, freedom, [one.seconds for one in samples])
    made = changed(found.values)
    links = dict(made.performance.links)
    links[Level.INSIDE_NODE] = replace(links[Level.INSIDE_NODE], residual=found.expected)
    return replace(made, performance=replace(made.performance, links=links))


ALONE = {"launch_us": LOOSE, "block_us": LOOSE, "step_us": LOOSE, "parameter_us": 0.3,
         "products": CLOSE, "attention": 0.3, "memory": 0.5}  # fmt: skip
"""Costs of the host and factors of kernels' times that runs of one process show, and how far these may move them: their
kernels find less in caches than kernels that are measured alone."""
TOGETHER = {"unit_us": WIDE, "styled_us": WIDE, "action_us": WIDE, "latency": 0.3}
"""Those that runs of several processes show."""
HOST = frozenset(one.name for one in fields(HostCosts))


def fit_runs(cluster: Cluster, runs: Sequence[TimedRun]) -> Cluster:
    """Fit the host's costs, and factors of kernels' times, to steps of runs of one process, and what else costs to
    those of several, which other programs disturb more."""
    alone, together = ([one for one in runs if (one.num_ranks > 1) is several] for several in (False, True))
    if alone:
        cluster, residual = _fit_costs(cluster, alone, ALONE)
        cluster = replace(cluster, performance=replace(cluster.performance, residual=residual))
    if together:
        cluster, residual = _fit_costs(cluster, together, TOGETHER)
        cluster = replace(cluster, performance=replace(cluster.performance, group_residual=residual))
    return replace(cluster, performance=rounded(cluster.performance))


def _fit_costs(cluster: Cluster, runs: Sequence[TimedRun], freedom: Mapping[str, float]) -> tuple[Cluster, float]:
    """Fit named costs to runs, and return the cluster with them and their residual."""
    host = cluster.performance.host
    start = [max(0.1, getattr(host, name)) if name in HOST else 1.0 for name in freedom]

    def changed(values: Sequence[float]) -> Cluster:
        costs = dict(zip(freedom, map(float, values), strict=True))
        made = _scaled(cluster, {name: us for name, us in costs.items() if name not in HOST})
        own = replace(host, **{name: us for name, us in costs.items() if name in HOST})
        return replace(made, performance=replace(made.performance, host=own))

    def predict(values: Floats) -> Floats:
        other = changed(values.tolist())
        return np.array([one.predict_us(other) for one in runs])

    found = fit_logs(predict, start, list(freedom.values()), [one.measured_us for one in runs])
    return changed(found.values), found.expected


def _scaled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Return the cluster with the times of parts of the work multiplied by factors."""
    old, by = cluster.performance, {name: factors.get(name, 1.0) for name in ("products", "attention", "latency")}
    performance = replace(
        old,
        products={
            name: replace(one, flops_per_s=one.flops_per_s / by["products"]) for name, one in old.products.items()
        },
        attention={
            name: replace(one, flops_per_s=one.flops_per_s / by["attention"]) for name, one in old.attention.items()
        },
        memory_efficiency=old.memory_efficiency / factors.get("memory", 1.0),
        links={level: replace(one, latency_us=one.latency_us * by["latency"]) for level, one in old.links.items()},
    )
    return replace(cluster, performance=performance)


def rounded(value: T) -> T:
    """Round every number in a value to four digits, which is more than measurements have, so that files are short."""
    if isinstance(value, float):
        return float(f"{value:.4g}")  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: rounded(getattr(value, one.name)) for one in fields(value)})
    return value
