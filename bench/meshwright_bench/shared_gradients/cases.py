"""Values of `bench shared-gradients`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.config.schema import RunConfig

PP = 2
SHARDED, WHOLE = "sharded", "whole"
"""Sides of the comparison: what FSDP2 left of the gradients is added up, or the whole gradients are."""


@dataclass(frozen=True)
class SyncTask:
    """The measurement at one number of shards."""

    result: Path
    config: RunConfig
    dp_shard: int
    rounds: int = 9
    steps: int = 3
