"""Request and result of the drift experiment, as values. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.config.schema import RunConfig


@dataclass(frozen=True)
class Curve:
    """A training, by step."""

    losses: tuple[float, ...]
    apart: tuple[float, ...]
    """After the step: the largest distance of a stage's copies from the first ones, as a share of their norm."""


@dataclass(frozen=True)
class Drift:
    """The same training twice."""

    synced: Curve
    """As it is: SYNC_SHARED is in the table."""
    unsynced: Curve
    """Without it."""
    loss_unit: str


@dataclass(frozen=True)
class DriftSpec:
    """What the ranks are asked."""

    config: RunConfig
    num_steps: int
    result: Path


def as_json(drift: Drift) -> str:
    """As `from_json` reads it."""
    return json.dumps(asdict(drift))


def from_json(text: str) -> Drift:
    """What `as_json` wrote."""
    found = json.loads(text)
    synced, unsynced = (
        Curve(tuple(curve["losses"]), tuple(curve["apart"])) for curve in (found["synced"], found["unsynced"])
    )
    return Drift(synced, unsynced, found["loss_unit"])
