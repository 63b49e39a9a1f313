"""Report of a benchmark: figures and targets, as a text table and as JSON.

Missed targets are shown like met ones, and figures that could not be measured are listed with the reason. Torch-free.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from meshwright import __version__
from meshwright.cluster.host import num_cores
from meshwright.units import format_bytes

PACKAGES = ("torch", "numpy")


@dataclass(frozen=True)
class Figure:
    """Measured value with unit, spread and target."""

    name: str
    value: float | None
    """Measured value; None if it could not be measured, with the reason in `note`."""
    unit: str = ""
    spread: tuple[float, float] | None = None
    """Minimum and maximum over the rounds; `value` is their median."""
    at_least: float | None = None
    """Lower bound of the target, if any."""
    at_most: float | None = None
    """Upper bound of the target, if any."""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Return True if the target is met; None without a target or a value."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        high_enough = self.at_least is None or self.value >= self.at_least
        return high_enough and (self.at_most is None or self.value <= self.at_most)


@dataclass(frozen=True)
class Report:
    """Figures of a benchmark, with device and date."""

    part: str
    device: str
    date: str
    """ISO date."""
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    """Descriptions of the comparisons, one line each."""


def of_rounds(
    name: str, values: Sequence[float], unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> Figure:
    """Return the figure with the median of the rounds and their spread."""
    return Figure(name, median(values), unit, (min(values), max(values)), at_least, at_most)


def cpu_name() -> str:
    """Return the CPU model and the number of usable cores, such as `AMD EPYC, 2 cores`."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text("utf-8").splitlines())
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), model)
    return f"{model}, {num_cores()} core{'s' if num_cores() > 1 else ''}"


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that affect the figures, without importing torch."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = metadata.version(name)
    return found | {"meshwright": __version__}


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as a JSON object; figures that were not measured are null."""
    figures: dict[str, float | None] = {}
    for figure in report.figures:
        figures[figure.name] = _rounded(figure.value)
        if figure.spread is not None:
            figures[f"{figure.name}_min"], figures[f"{figure.name}_max"] = map(_rounded, figure.spread)
    return {
        "part": report.part,
        "device": report.device,
        "date": report.date,
        "versions": versions(),
        "figures": figures,
    }


def table(report: Report) -> list[str]:
    """Return the report as lines of text: device, notes, and figures with spread and target."""
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    rows = [("figure", "value", "unit", "min … max", "target")]
    rows += [_row(figure) for figure in report.figures]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{report.part} · {report.device} · {named} · {report.date}", *report.notes, ""]
    return lines + [_aligned(row, widths) for row in rows] + _summary(report.figures)


def _row(figure: Figure) -> tuple[str, str, str, str, str]:
    spread = "" if figure.spread is None else " … ".join(_written(value, figure.unit)[0] for value in figure.spread)
    bounds = (("≥", figure.at_least), ("≤", figure.at_most))
    target = " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    if figure.is_met is not None:
        target += "  ✓ met" if figure.is_met else "  ✗ MISSED"
    if figure.value is None:
        return figure.name, f"unmeasured: {figure.note}", "", spread, target
    value, unit = _written(figure.value, figure.unit)
    return figure.name, value, unit, spread, target


def _written(value: float, unit: str) -> tuple[str, str]:
    """Return a value and its unit as text."""
    if unit == "bytes":
        number, _, name = format_bytes(value).partition(" ")
        return number, name
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"), unit


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _summary(figures: Sequence[Figure]) -> list[str]:
    """Return a line that lists the missed targets, if any."""
    missed = [figure.name for figure in figures if figure.is_met is False]
    return [f"missed: {', '.join(missed)}"] if missed else []


def _rounded(value: float | None) -> float | None:
    """Round to five significant digits, since further digits are noise."""
    return None if value is None else float(f"{value:.5g}")
