"""Fit parameters of devices, links and programs to published runs: `python -m meshwright_bench.published.fit`.

It sees only the rows that aren't held out (`rows.rows_to_fit`). The sum of the errors' magnitudes is minimised, since a
few rows are off for reasons that no row states: reweighted least squares on logarithms, from the last fit or stated
values, without chance. A weak prior keeps what no row decides near its start. Doesn't import torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.performance import Performance
from meshwright.cluster.presets import preset_on
from meshwright.units import counted
from meshwright_bench.published.accuracy import plausible_plans, predict
from meshwright_bench.published.plans import Made
from meshwright_bench.published.programs import ALIKE, FITTED, PROGRAMS, fitted, with_parameters
from meshwright_bench.published.rows import Row, rows_to_fit

Floats = NDArray[np.float64]
SMALL = 0.02
"""Errors below this count as squares, larger ones as magnitudes."""
STEP = 0.02
ITERATIONS = 8
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


@dataclass(frozen=True)
class Parameter:
    """A positive parameter: of a device's curve, a link or a program's stack."""

    path: str
    start: float
    prior: float = 0.5
    """Standard deviation of its logarithm from that of the start."""


RATE, INNER = "products/16/flops_per_s", "products/16/half_inner"
ROWS, HALF = "products/16/half_rows", "products/16/half_columns"
ATTENTION, LENGTH = "attention/16/flops_per_s", "attention/16/half_length"
PARAMETERS = (
    # Large products reach about 80 % of an A100's peak rate, 75 % of a V100's, and 65 to 70 % of an H100's, whose power
    # is limited. FlashAttention 2's forward reaches 60 % of an A100's peak, and 35 to 40 % of an H100's (Dao 2023).
    Parameter(f"A100-40/{RATE}", 2.5e14), Parameter(f"A100-80/{RATE}", 2.5e14),
    Parameter(f"A100/{ROWS}", 100), Parameter(f"A100/{HALF}", 200),
    Parameter(f"A100/{INNER}", 100), Parameter(f"A100/{ATTENTION}", 1.87e14, 0.05),
    Parameter(f"A100/{LENGTH}", 256), Parameter("A100/memory_efficiency", 0.85, 0.1),
    Parameter(f"H100-700W/{RATE}", 6.5e14), Parameter("H100-700W/products/float8/flops_per_s", 1.2e15, 0.3),
    Parameter(f"H100-500W/{RATE}", 5.8e14, 0.2), Parameter("H100-500W/products/float8/flops_per_s", 1.0e15, 0.3),
    Parameter(f"H100/{ROWS}", 100), Parameter(f"H100/{HALF}", 200), Parameter(f"H100/{INNER}", 100),
    Parameter(f"H100-700W/{ATTENTION}", 4e14, 0.1), Parameter(f"H100-500W/{ATTENTION}", 3e14, 0.1),
    Parameter(f"H100/{LENGTH}", 256), Parameter("H100/memory_efficiency", 0.85, 0.1),
    Parameter(f"V100/{RATE}", 9.5e13, 0.05),
    Parameter(f"V100/{ROWS}", 100), Parameter(f"V100/{HALF}", 200), Parameter(f"V100/{INNER}", 100),
    Parameter(f"V100/{ATTENTION}", 6e13, 0.2), Parameter("V100/memory_efficiency", 0.85, 0.05),
    # Links
    Parameter("tcpx/efficiency", 0.6), Parameter("nvlink2/efficiency", 0.85, 0.2),
    Parameter("edr-eighth/efficiency", 0.85, 0.2), Parameter("edr-eighth/half_bytes", 3e6),
    # Programs
    Parameter("llm-foundry/slower_attention", 1.6), Parameter("llm-foundry/slower_memory", 1.1),
    Parameter("llm-foundry/slower_beside", 0.15), Parameter("llm-foundry-fp8/slower_attention", 1.6, 0.2),
    Parameter("llm-foundry-fp8/slower_memory", 1.2),
    Parameter("megatron-2021/slower_attention", 1.5), Parameter("megatron-2021/slower_memory", 1.0),
    Parameter("megatron-2021/slower_products", 1.05, 0.1), Parameter("megatron-dlperf/slower_attention", 1.2),
    Parameter("megatron-dlperf/slower_memory", 1.0),
    Parameter("megatron-2022/slower_attention", 1.5), Parameter("megatron-2022/slower_memory", 1.0),
    Parameter("deepspeed/slower_products", 1.1, 0.2),
    Parameter("oneflow/slower_attention", 1.2), Parameter("oneflow/slower_memory", 1.0),
    Parameter("torchtitan/slower_ring", 0.1, 1.0), Parameter("torchtitan-eager/slower_memory", 1.1, 0.3),
    Parameter("async-tp/hidden_tensor", 0.4), Parameter("rowwise/slower_float8", 1.1),
)  # fmt: skip


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
    """Return a performance with a field of it, or of a curve, replaced; both dtypes of 16 bits have the same curves,
    and float8 their shapes: tiles are as large, but twice as deep."""
    kind, _, rest = name.partition("/")
    changes: dict[str, Any] = {kind: value}
    if rest:
        rate, _, field = rest.partition("/")
        curves = dict(getattr(performance, kind))
        for one in [one for one in curves if one == rate or (rate == "16" and one.endswith("float16"))]:
            curves[one] = replace(curves[one], **{field: value})
        if rate == "16" and kind == "products" and field.startswith("half_") and "float8" in curves:
            deeper = 2 if field == "half_inner" else 1
            curves["float8"] = replace(curves["float8"], **{field: deeper * value})
        changes = {kind: curves}
    return replace(performance, **changes)


def _affects(path: str, made: Made) -> bool:
    """Return whether a parameter has an effect on a plan's time."""
    owner = path.partition("/")[0]
    stack = PROGRAMS[made.program].stack.name
    members = (*GROUPS.get(owner, ()), *ALIKE.get(owner, (owner,)))
    return made.cluster in members or made.link in members or stack in members or owner == "nvlink2"


class Problem:
    """Rows to fit, with the plan of each that is the fastest."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._candidates = {row: plausible_plans(row) for row in rows}
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
        return predict(made, cluster, with_parameters(PROGRAMS[made.program].stack, values))[0]


def fit(
    problem: Problem, parameters: Sequence[Parameter] = PARAMETERS, first: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the parameters' values; the search begins at those of an earlier fit, if there are any."""
    first = first or {}
    start, priors = np.log([one.start for one in parameters]), np.array([one.prior for one in parameters])
    at, damping = np.log([first.get(one.path, one.start) for one in parameters]), 1e-3

    def values(logs: Floats) -> dict[str, float]:
        return {one.path: float(np.exp(log)) for one, log in zip(parameters, logs, strict=True)}

    def cost(errors: Floats, logs: Floats) -> float:
        return float(np.sqrt(errors**2 + SMALL**2).sum() + 0.5 * SMALL * (((logs - start) / priors) ** 2).sum())

    for number in range(ITERATIONS):
        if number <= 1:  # later changes of plans would keep the search from ending
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
        logging.info("%d: cost %.4f → %.4f, median %.4f", number, best, after, np.median(np.abs(errors)))
        if best - after < 1e-3:
            break
    return values(at)


def main() -> None:
    """Fit all parameters and write them to `fitted.toml`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    problem = Problem(rows_to_fit())
    found = fit(problem, first=fitted())
    head = f"# Written by python -m meshwright_bench.published.fit, from {counted(len(problem.rows), 'row')}\n"
    lines = (f'"{path}" = {value:.4g}\n' for path, value in found.items())
    FITTED.write_text(f"{head}[parameters]\n{''.join(lines)}", encoding="utf-8")


if __name__ == "__main__":
    main()
