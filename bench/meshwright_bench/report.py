"""What a benchmark found: figures with their targets, as the table a person reads and the JSON a program does.

A target that was missed is shown like one that was met, and what could not be measured here is stated with the
reason: a figure that is simply absent would read as if nobody had promised it. Torch-free.
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
    """One number."""

    name: str
    value: float | None
    """None where it could not be measured; `note` says why."""
    unit: str = ""
    spread: tuple[float, float] | None = None
    """Least and greatest of the rounds that `value` is the median of."""
    at_least: float | None = None
    """The target, if it has one."""
    at_most: float | None = None
    """The target where less is better."""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without a target or a value."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        high_enough = self.at_least is None or self.value >= self.at_least
        return high_enough and (self.at_most is None or self.value <= self.at_most)


@dataclass(frozen=True)
class Report:
    """The figures of one part, and what they were measured on."""

    part: str
    device: str
    date: str
    """Year-month-day."""
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    """What was compared with what, one line each."""


def of_rounds(
    name: str, values: Sequence[float], unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> Figure:
    """The median over rounds, and their least and greatest."""
    return Figure(name, median(values), unit, (min(values), max(values)), at_least, at_most)


def cpu_name() -> str:
    """The processor's model and the cores this process may use: `AMD EPYC, 2 cores`."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text("utf-8").splitlines())
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), model)
    return f"{model}, {num_cores()} core{'s' if num_cores() > 1 else ''}"


def versions() -> dict[str, str]:
    """Versions of what the figures depend on. Torch's is read without importing it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = metadata.version(name)
    return found | {"meshwright": __version__}


def as_json(report: Report) -> dict[str, Any]:
    """The report as the JSON object of a benchmark; a figure that was not measured is null."""
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
    """The report as lines of text: the machine, what was compared, the figures with spread and target."""
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
    """A value and its unit as they are printed."""
    if unit == "bytes":
        number, _, name = format_bytes(value).partition(" ")
        return number, name
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"), unit


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _summary(figures: Sequence[Figure]) -> list[str]:
    """What a person should not have to count: missed targets."""
    missed = [figure.name for figure in figures if figure.is_met is False]
    return [f"missed: {', '.join(missed)}"] if missed else []


def _rounded(value: float | None) -> float | None:
    """Five significant digits: more is noise."""
    return None if value is None else float(f"{value:.5g}")
