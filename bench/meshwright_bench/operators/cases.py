"""Sides, cases and outcomes of `bench operators`. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Side(StrEnum):
    """Implementation that runs the operators."""

    DTENSOR = "dtensor"
    FALLBACK = "fallback"


class InputPlacement(StrEnum):
    """Placement of all inputs."""

    SHARD = "shard0"
    REPLICATED = "replicate"


class Outcome(StrEnum):
    """Outcome of an operator on its first sample, over all ranks."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_IMPLEMENTED = "not_implemented"
    OTHER_ERROR = "other_error"
    """Includes ranks that died, or waited for others that had failed."""
    REFUSED = "not_a_function"
    """Rejected with a `MeshwrightError`: the operator is not a function of its inputs' values."""
    UNDEFINED = "undefined_values"
    """Succeeded, but the values are random or uninitialized: only shapes are compared."""
    LEFT_OUT = "left_out"
    """Has no float32 sample, fails on plain tensors too, or has sparse inputs."""


@dataclass(frozen=True)
class SweepTask:
    """Sweep of one side over all operators.

    Attributes:
        lines: file in which rank 0 records each case before it runs, and then its outcome.
        num_done: number of cases that are already in `lines`.
    """

    lines: Path
    side: Side
    num_done: int = 0


@dataclass(frozen=True)
class Case:
    """An operator with one input placement, and the outcome."""

    operator: str
    placed: InputPlacement
    outcome: Outcome
    note: str = ""


def begin_line(lines: Path, operator: str, placed: InputPlacement) -> None:
    """Record a case before it runs, so that a case that kills the ranks is known."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(f"{operator}\t{placed}")


def end_line(lines: Path, outcome: Outcome, note: str) -> None:
    """Record the outcome of the last case."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(f"\t{outcome}\t{json.dumps(note[:500])}\n")
