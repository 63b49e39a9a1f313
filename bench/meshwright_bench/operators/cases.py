"""Values of `bench operators`: the sides, the cases and their outcomes. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Side(StrEnum):
    """Who runs the operators."""

    DTENSOR = "dtensor"
    FALLBACK = "fallback"


class Placed(StrEnum):
    """How all inputs lie."""

    SHARD = "shard0"
    COPIES = "replicate"


class Outcome(StrEnum):
    """What came of one operator on its first sample, in all ranks' view."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_IMPLEMENTED = "not_implemented"
    OTHER_ERROR = "other_error"
    """Also: ranks that died, or waited for others that had failed."""
    REFUSED = "not_a_function"
    """A `MeshwrightError` that says the operator is not a function of its inputs' values."""
    UNDEFINED = "undefined_values"
    """Ran, with values that are drawn or never set: only shapes are compared."""
    LEFT_OUT = "left_out"
    """Has no sample in float32, fails on plain tensors too, or its inputs are sparse."""


@dataclass(frozen=True)
class SweepTask:
    """One side's way through all operators.

    Attributes:
        lines: where rank 0 notes each case before it is run, and what came of it.
        num_done: cases that are in `lines` already.
    """

    lines: Path
    side: Side
    num_done: int = 0


@dataclass(frozen=True)
class Case:
    """One operator with its inputs placed one way, and what came of it."""

    operator: str
    placed: Placed
    outcome: Outcome
    note: str = ""


def begin_line(lines: Path, operator: str, placed: Placed) -> None:
    """Note a case before it is run, so that one on which the ranks die has a name."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(f"{operator}\t{placed}")


def end_line(lines: Path, outcome: Outcome, note: str) -> None:
    """Note what came of the case that was begun last."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(f"\t{outcome}\t{json.dumps(note[:500])}\n")
