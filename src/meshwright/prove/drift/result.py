"""Request and result of the drift experiment, as values. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.config.schema import RunConfig


@dataclass(frozen=True)
class DriftCurve:
    """A training, by step."""

    losses: tuple[float, ...]
    distances: tuple[float, ...]
    """After the step: the largest distance of a stage's copies from the first ones, as a share of their norm."""


@dataclass(frozen=True)
class DriftResult:
    """The same training twice."""

    synced: DriftCurve
    """As it is: SYNC_SHARED is in the table."""
    unsynced: DriftCurve
    """Without it."""
    loss_unit: str


@dataclass(frozen=True)
class DriftSpec:
    """What the ranks are asked."""

    config: RunConfig
    num_steps: int
    result: Path


def as_json(drift: DriftResult) -> str:
    """As `from_json` reads it."""
    return json.dumps(asdict(drift))


def from_json(text: str) -> DriftResult:
    """What `as_json` wrote."""
    found = json.loads(text)
    synced, unsynced = (
        DriftCurve(tuple(curve["losses"]), tuple(curve["apart"])) for curve in (found["synced"], found["unsynced"])
    )
    return DriftResult(synced, unsynced, found["loss_unit"])
