"""Sides, cases, outcomes and timed steps of `bench operators`. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Side(StrEnum):
    """Implementation that runs the operators."""

    DTENSOR = "dtensor"
    FALLBACK = "fallback"


class TimedSide(StrEnum):
    """Context in which operators and steps are timed."""

    OUTSIDE = "outside"
    FOR_DTENSOR = "for_dtensor"
    FALLBACK = "fallback"


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the transformer of the timed step."""

    width: int = 128
    num_heads: int = 4
    num_layers: int = 4
    vocabulary: int = 256
    batch: int = 4
    length: int = 64


@dataclass(frozen=True)
class TimesTask:
    """Measurement of times on four ranks.

    Attributes:
        result: file to which rank 0 writes the seconds.
        rounds: rounds of the alternation.
        steps: training steps per block.
        calls: calls of an operator per block.
        sizes: sizes of the model.
    """

    result: Path
    rounds: int = 10
    steps: int = 2
    calls: int = 1000
    sizes: StepSizes = StepSizes()


class InputPlacement(StrEnum):
    """Placement of all inputs."""

    SHARD = "shard0"
    SHARD_LAST = "shard-1"
    """Along the last dim; only swept with gradients."""
    REPLICATED = "replicate"


class Outcome(StrEnum):
    """Outcome of an operator on its first sample, over all ranks."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_IMPLEMENTED = "not_implemented"
    OTHER_ERROR = "other_error"
    """Other errors, including ranks that died or waited for failed ranks."""
    REFUSED = "not_a_function"
    """Rejected with a `MeshwrightError`: the operator is not a function of its inputs' values."""
    UNDEFINED = "undefined_values"
    """Succeeded, but the values are random or uninitialized: only shapes are compared."""
    LEFT_OUT = "left_out"
    """No float32 sample, failure on plain tensors too, or sparse inputs."""


@dataclass(frozen=True)
class SweepTask:
    """Sweep of one side over all operators.

    Attributes:
        lines: file in which rank 0 records each case before it runs, and then its outcome.
        num_done: number of cases already in `lines`.
        gradients: also compare the gradients of the inputs, where an operator has them.
        names: operators to run; all if empty.
        placements: placements of all inputs.
        timeout_s: timeout of an operator's collectives, after which waiting ranks continue.
    """

    lines: Path
    side: Side
    num_done: int = 0
    gradients: bool = False
    names: tuple[str, ...] = ()
    placements: tuple[InputPlacement, ...] = (InputPlacement.SHARD, InputPlacement.REPLICATED)
    timeout_s: float = 5.0


@dataclass(frozen=True)
class Case:
    """Operator with one input placement, and the outcome."""

    operator: str
    placed: InputPlacement
    outcome: Outcome
    note: str = ""


def begin_line(lines: Path, operator: str, placed: InputPlacement) -> None:
    """Record a case before it runs, to identify a case that kills the ranks."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(f"{operator}\t{placed}")


def end_line(lines: Path, outcome: Outcome, note: str) -> None:
    """Record the outcome of the last case."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(f"\t{outcome}\t{json.dumps(note[:500])}\n")
