"""Fit the curves of `cluster/performance.py` to measured times, by least squares on their logarithms, so that a time of
1 µs counts as much as one of 1 s. A residual is the standard deviation of log(measured / predicted). Doesn't import
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster.collectives import CollectiveOp
from meshwright.cluster.hardware import Cluster
from meshwright.cluster.performance import AttentionCurve, HostCosts, LinkCurve, ProductCurve

Floats = NDArray[np.float64]

PRIOR_WEIGHT = 0.02
"""Weight of the prior that half of the rate is reached at `PRIOR_HALF`: it decides what no measurement does."""
PRIOR_HALF = 16.0
ITERATIONS = 60
HOST_WEIGHT = 0.1
"""Weight of a host cost's first estimate, in runs that the estimate would be wrong in by as much as it is."""


@dataclass(frozen=True)
class TimedProduct:
    rows: int
    inner: int
    columns: int
    seconds: float


@dataclass(frozen=True)
class TimedAttention:
    length: int
    flops: float
    """Operations of the forward."""
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class TimedCollective:
    op: CollectiveOp
    num_bytes: int
    num_ranks: int
    seconds: float


@dataclass(frozen=True)
class MemoryFit:
    """Time of kernels bound by memory: a time per kernel, and the bytes that they read and write over a bandwidth."""

    launch_us: float
    bytes_per_s: float
    residual: float


@dataclass(frozen=True)
class TimedRun:
    """A run's time per step, and the prediction of it for a cluster."""

    predict_us: Callable[[Cluster], float]
    measured_us: float


def fit_products(samples: Sequence[TimedProduct]) -> ProductCurve:
    """Fit the rate of products of a dtype."""
    sizes = np.array([(one.rows, one.inner, one.columns) for one in samples], float)
    rate, halves, residual = _fit_rate(2 * sizes.prod(axis=1), sizes, np.array([one.seconds for one in samples]))
    rows, inner, columns = (_rounded(half) for half in halves)
    return ProductCurve(_rounded(rate), rows, inner, columns, residual=_rounded(residual))


def fit_attention(samples: Sequence[TimedAttention]) -> AttentionCurve:
    """Fit the rate of attention of a dtype, and how much slower its backward is."""
    lengths, flops = np.array([[one.length] for one in samples], float), np.array([one.flops for one in samples])
    rate, halves, _ = _fit_rate(flops, lengths, np.array([one.forward_s for one in samples]))
    predicted = flops / rate * (1 + halves[0] / lengths[:, 0])
    forward = np.log([one.forward_s for one in samples] / predicted)
    backward = np.log([one.backward_s for one in samples] / (2.5 * predicted))
    slower = float(np.exp(backward.mean()))
    residual = float(np.concatenate([forward, backward - backward.mean()]).std())
    return AttentionCurve(_rounded(rate), _rounded(float(halves[0])), _rounded(slower), _rounded(residual))


def _fit_rate(flops: Floats, sizes: Floats, seconds: Floats) -> tuple[float, Floats, float]:
    """Fit `seconds = flops / rate · Π (size + half) / size` by Gauss–Newton on logarithms with damped steps.

    Returns:
        the rate, a half for each column of `sizes`, and the residual.
    """
    target = np.log(seconds / flops)
    guess = np.concatenate([[target.min()], np.full(sizes.shape[1], np.log(PRIOR_HALF))])
    prior = np.log(PRIOR_HALF)

    def errors(values: Floats) -> tuple[Floats, Floats]:
        halves = np.exp(values[1:])
        found = target - values[0] - np.log1p(halves / sizes).sum(axis=1)
        slopes = np.column_stack([np.ones(len(target)), halves / (sizes + halves)])
        kept = np.concatenate([found, PRIOR_WEIGHT * (prior - values[1:])])
        return kept, np.vstack([slopes, PRIOR_WEIGHT * np.eye(len(values))[1:]])

    damping, (found, slopes) = 1e-2, errors(guess)
    for _ in range(ITERATIONS):
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(guess)), slopes.T @ found)
        tried = guess + np.clip(step, -2, 2)
        other, other_slopes = errors(tried)
        if other @ other < found @ found:
            guess, found, slopes, damping = tried, other, other_slopes, damping / 3
        else:
            damping *= 4
    return float(np.exp(-guess[0])), np.exp(guess[1:]), float(found[: len(target)].std())


def fit_memory(samples: Sequence[tuple[int, float]]) -> MemoryFit:
    """Fit the time of kernels bound by memory to samples of bytes moved and seconds."""
    seconds = np.array([each for _, each in samples])
    rows = np.array([(1.0, moved) for moved, _ in samples])
    (launch, per_byte), residual = fit_positive(rows, seconds)
    return MemoryFit(_rounded(launch * 1e6), _rounded(1 / max(per_byte, 1e-18)), _rounded(residual))


def fit_link(samples: Sequence[TimedCollective], *, cores: int = 0) -> tuple[float, LinkCurve]:
    """Fit a link inside a node to collectives: its bandwidth in bytes per second, and its curve.

    With `cores`, ranks are processes that share them, which slows collectives of more ranks than cores
    (`cluster/collectives.py`).
    """
    rows = []
    for one in samples:
        twice = 2 if one.op == CollectiveOp.ALL_REDUCE else 1
        slower = max(1.0, one.num_ranks / cores) if cores else 1.0
        steps = twice * (one.num_ranks - 1) * slower
        rows.append((steps, steps * one.num_bytes / one.num_ranks))
    (latency, per_byte), residual = fit_positive(np.array(rows), np.array([one.seconds for one in samples]))
    return _rounded(1 / max(per_byte, 1e-18)), LinkCurve(_rounded(latency * 1e6), residual=_rounded(residual))


def fit_positive(rows: Floats, seconds: Floats) -> tuple[Floats, float]:
    """Fit non-negative coefficients of `rows` to times by their relative errors; return them and the residual."""
    scaled, target = rows / seconds[:, None], np.ones(len(seconds))
    used = np.ones(rows.shape[1], bool)
    while True:
        found = np.zeros(rows.shape[1])
        found[used] = np.linalg.lstsq(scaled[:, used], target, rcond=None)[0]
        if (found >= 0).all():
            break
        used[int(found.argmin())] = False
    ratios = np.log(scaled @ found)
    return found * np.exp(-ratios.mean()), float(ratios.std())


def fit_host(cluster: Cluster, runs: Sequence[TimedRun]) -> HostCosts:
    """Fit the host's costs to the times of runs, starting at those of the cluster, which decide what no run does."""
    host = cluster.performance.host
    names = [one.name for one in fields(HostCosts) if one.name != "residual"]
    start = np.array([getattr(host, name) for name in names])
    scale = np.maximum(start, 1.0)
    measured = np.array([one.measured_us for one in runs])

    def predict(values: Floats) -> Floats:
        changed = replace(host, **dict(zip(names, map(float, values), strict=True)))
        other = replace(cluster, performance=replace(cluster.performance, host=changed))
        return np.array([one.predict_us(other) for one in runs])

    values = start.copy()
    for _ in range(4):  # nearly linear: what a plan waits for changes with the costs
        base = predict(values)
        columns = [(predict(values + scale * unit) - base) / base for unit in np.eye(len(values))]
        slopes = np.vstack([np.column_stack(columns), HOST_WEIGHT * np.eye(len(values))])
        target = np.concatenate([np.log(measured / base), HOST_WEIGHT * (start - values) / scale])
        step = np.linalg.lstsq(slopes, target, rcond=None)[0]
        values = np.maximum(values + scale * np.clip(step, -2, 2), 0.0)
    residual = float(np.sqrt(np.mean(np.log(measured / predict(values)) ** 2)))
    found = {name: _rounded(float(value)) for name, value in zip(names, values, strict=True)}
    return HostCosts(**found, residual=_rounded(residual))


def recalibrated(cluster: Cluster, predicted: Mapping[str, float], measured: Mapping[str, float]) -> Cluster:
    """Return the cluster with the parts of its performance scaled so that a run's predicted parts take what was
    measured: `products`, `attention`, `memory` and `host`; parts that only one of them has are left as they are."""
    ratio = {part: measured[part] / us for part, us in predicted.items() if us > 0 and measured.get(part, 0.0) > 0}
    old = cluster.performance
    products, attention = ratio.get("products", 1.0), ratio.get("attention", 1.0)
    host = {
        one.name: getattr(old.host, one.name) * ratio.get("host", 1.0)
        for one in fields(HostCosts)
        if one.name != "residual"
    }
    new = replace(
        old,
        source=f"{old.source}; recalibrated by a run",
        products={
            name: replace(one, flops_per_s=_rounded(one.flops_per_s / products)) for name, one in old.products.items()
        },
        attention={
            name: replace(one, flops_per_s=_rounded(one.flops_per_s / attention)) for name, one in old.attention.items()
        },
        memory_efficiency=_rounded(old.memory_efficiency / ratio.get("memory", 1.0)),
        host=replace(old.host, **{name: _rounded(us) for name, us in host.items()}),
    )
    return replace(cluster, performance=new)


def _rounded(value: float) -> float:
    """Round to four digits, which is more than measurements have, so that files are short."""
    return float(f"{value:.4g}")
