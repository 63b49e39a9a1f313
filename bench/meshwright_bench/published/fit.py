"""Fit parameters of devices, links and programs to published runs: `python -m meshwright_bench.published.fit`.

It sees only the rows that aren't held out (`rows.rows_to_fit`). The sum of the errors' magnitudes is minimised, since a
few rows are off for reasons that no row states: reweighted least squares on logarithms, from stated starting values,
without chance. A weak prior keeps what no row decides near its start. Doesn't import torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.performance import Performance
from meshwright.cluster.presets import preset_on
from meshwright.cluster.stacks import Stack
from meshwright_bench.published.accuracy import predict
from meshwright_bench.published.plans import Made, plans_of
from meshwright_bench.published.programs import PROGRAMS
from meshwright_bench.published.rows import Row

Floats = NDArray[np.float64]
SMALL = 0.02
"""Errors below this count as squares, larger ones as magnitudes."""
STEP = 0.02
ITERATIONS = 8
MOST_STAGES = 8
"""Rows with more pipeline stages take too long to predict often; they are neither fitted nor held out for it."""
GROUPS = {
    "A100": ("A100-40", "A100-80"),
    "H100": ("H100", "H200", "H100-96"),
    "H100-700W": ("H100", "H200"),
    "H100-500W": ("H100-96",),
    "V100": ("V100-16",),
    "A100-40": ("A100-40",),
    "A100-80": ("A100-80",),
}
"""Presets that share a parameter of their curves, as they have the same processor, or power."""
FAMILIES = {
    "oneflow": ("oneflow", "oneflow-hybrid"),
    "torchtitan": (
        "torchtitan",
        "torchtitan-eager",
        "torchtitan-rowwise",
        "torchtitan-async-tp",
        "torchtitan-async-tp-rowwise",
    ),
    "async-tp": ("torchtitan-async-tp", "torchtitan-async-tp-rowwise"),
    "rowwise": ("torchtitan-rowwise", "torchtitan-async-tp-rowwise"),
}
"""Stacks that share a parameter."""


@dataclass(frozen=True)
class Parameter:
    """A positive parameter: of a device's curve, a link or a program's stack."""

    path: str
    start: float
    prior: float = 0.5
    """Standard deviation of the logarithm, relative to the start."""


def apply_to_cluster(cluster: Cluster, preset: str, link: str, values: Mapping[str, float]) -> Cluster:
    """Return a cluster with the parameters of its device and links."""
    performance = cluster.performance
    for path, value in values.items():
        owner, _, name = path.partition("/")
        if preset in GROUPS.get(owner, ()):
            performance = _with_curve(performance, name, value)
        elif owner == link or (owner == "nvlink2" and preset.startswith("V100")):
            level = "inside_node" if owner != link else "between_nodes"
            links = dict(performance.links)
            links[level] = replace(links[level], **{name: value})
            performance = replace(performance, links=links)
    return replace(cluster, performance=performance)


def _with_curve(performance: Performance, name: str, value: float) -> Performance:
    """Return a performance with a field of a curve replaced; those of 16 bits have the same curves."""
    kind, _, rest = name.partition("/")
    if not rest:
        return replace(performance, **{name: value})
    if kind == "host":
        return replace(performance, host=replace(performance.host, **{rest: value}))
    rate, _, field = rest.partition("/")
    curves = dict(getattr(performance, kind))
    for one in [one for one in curves if one == rate or (rate == "16" and one.endswith("float16"))]:
        fields = ("half_rows", "half_columns") if field == "half" else (field,)
        curves[one] = replace(curves[one], **dict.fromkeys(fields, value))
    return replace(performance, **{kind: curves})


def _affects(path: str, made: Made) -> bool:
    """Return whether a parameter has an effect on a plan's time."""
    owner = path.partition("/")[0]
    stack = PROGRAMS[made.program].stack.name
    members = (*GROUPS.get(owner, ()), *FAMILIES.get(owner, (owner,)))
    return made.cluster in members or made.link in members or stack in members or owner == "nvlink2"


def apply_to_stack(stack: Stack, values: Mapping[str, float]) -> Stack:
    """Return a stack with its parameters."""
    found = ((path.partition("/"), value) for path, value in values.items())
    own = {name: value for (owner, _, name), value in found if stack.name in FAMILIES.get(owner, (owner,))}
    return replace(stack, **own)


class Problem:
    """Rows to fit, with the plan of each that is the fastest."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._candidates = {row: list(plans_of(row)) for row in rows if row.size("pp") <= MOST_STAGES}
        self.rows = list(self._candidates)
        self._clusters = {(made.cluster, made.link): preset_on(made.cluster, made.link)
                          for found in self._candidates.values() for made in found}  # fmt: skip
        self._best: dict[Row, Made] = {}

    def choose(self, values: Mapping[str, float]) -> None:
        """Choose the fastest plan of each row."""
        self._best = {
            row: min(found, key=lambda made: self._seconds(made, values)) for row, found in self._candidates.items()
        }

    def errors(self, values: Mapping[str, float]) -> Floats:
        """Return the logarithms of predicted over measured times."""
        return np.array([self._error(row, values) for row in self.rows])

    def slopes(self, values: Mapping[str, float], path: str, errors: Floats) -> Floats:
        """Return the derivatives of the errors by the logarithm of a parameter."""
        moved = {**values, path: values[path] * math.exp(STEP)}
        found = [
            self._error(row, moved) - error if _affects(path, self._best[row]) else 0.0
            for row, error in zip(self.rows, errors, strict=True)
        ]
        return np.array(found) / STEP

    def _error(self, row: Row, values: Mapping[str, float]) -> float:
        assert row.seconds is not None  # or it would be out
        return math.log(self._seconds(self._best[row], values) / row.seconds)

    def _seconds(self, made: Made, values: Mapping[str, float]) -> float:
        cluster = apply_to_cluster(self._clusters[made.cluster, made.link], made.cluster, made.link, values)
        return predict(made, cluster, apply_to_stack(PROGRAMS[made.program].stack, values))[0]


def fit(problem: Problem, parameters: Sequence[Parameter], say: bool = True) -> dict[str, float]:
    """Return the parameters' values."""
    start = np.log([one.start for one in parameters])
    priors, at, damping = np.array([one.prior for one in parameters]), start.copy(), 1e-3

    def values(logs: Floats) -> dict[str, float]:
        return {one.path: float(np.exp(log)) for one, log in zip(parameters, logs, strict=True)}

    def cost(errors: Floats, logs: Floats) -> float:
        return float(np.sqrt(errors**2 + SMALL**2).sum() + 0.5 * SMALL * (((logs - start) / priors) ** 2).sum())

    for number in range(ITERATIONS):
        problem.choose(values(at))
        errors = problem.errors(values(at))
        best = cost(errors, at)
        found = values(at)
        jacobian = np.stack([problem.slopes(found, one.path, errors) for one in parameters], axis=1)
        weights = 1 / np.sqrt(errors**2 + SMALL**2)
        normal = jacobian.T @ (weights[:, None] * jacobian) + SMALL * np.diag(priors**-2)
        slope = jacobian.T @ (weights * errors) + SMALL * (at - start) / priors**2
        for _ in range(5):
            moved = at - np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope), -0.5, 0.5)
            if (after := cost(problem.errors(values(moved)), moved)) < best:
                at, damping = moved, damping / 3
                break
            damping *= 5
        if say:
            print(f"{number}: {best:.4f} → {after:.4f}, median {np.median(np.abs(errors)):.4f}", file=sys.stderr)
        if best - after < 1e-3:
            break
    return values(at)
