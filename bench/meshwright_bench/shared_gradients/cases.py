"""Sides and tasks of `bench shared-gradients`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.config.schema import RunConfig

PP = 2
SHARDED, FULL = "sharded", "whole"
"""Sides of the comparison: summing the gradient shards that FSDP2 left, or full gradients."""


@dataclass(frozen=True)
class SyncTask:
    """Measurement for one number of shards."""

    result: Path
    config: RunConfig
    dp_shard: int
    rounds: int = 9
    steps: int = 3
