"""Specification and result of the drift experiment. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.config.schema import RunConfig


@dataclass(frozen=True)
class DriftCurve:
    """Losses and distances of one training run, per step."""

    losses: tuple[float, ...]
    distances: tuple[float, ...]
    """Largest relative distance of any stage's copies from the first stage's, after each step."""


@dataclass(frozen=True)
class DriftResult:
    """Curves of training with and without gradient sync of shared parameters."""

    synced: DriftCurve
    """Training with SYNC_SHARED."""
    unsynced: DriftCurve
    """Training without SYNC_SHARED."""
    loss_unit: str


@dataclass(frozen=True)
class DriftSpec:
    """Experiment settings passed to the ranks."""

    config: RunConfig
    num_steps: int
    result: Path


def as_json(drift: DriftResult) -> str:
    """Serialize the result."""
    return json.dumps(asdict(drift))


def from_json(text: str) -> DriftResult:
    """Deserialize the output of `as_json`."""
    found = json.loads(text)
    synced, unsynced = (
        DriftCurve(tuple(curve["losses"]), tuple(curve["distances"])) for curve in (found["synced"], found["unsynced"])
    )
    return DriftResult(synced, unsynced, found["loss_unit"])
