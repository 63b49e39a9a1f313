"""Sides and tasks of `bench muon`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.config.schema import RunConfig

OWNERS, EVERYWHERE = "owners", "everywhere"
"""Sides of the update: each matrix on its owner, or every matrix on every rank after an all-gather."""


@dataclass(frozen=True)
class UpdateTask:
    """Update of square matrices whose rows are sharded over the ranks."""

    result: Path
    size: int
    num_matrices: int
    rounds: int = 5
    steps: int = 2


@dataclass(frozen=True)
class StepTask:
    """Training steps of one process under each optimizer."""

    result: Path
    configs: dict[str, RunConfig]
    rounds: int = 5
    steps: int = 5
