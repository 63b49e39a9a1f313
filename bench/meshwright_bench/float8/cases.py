"""Trainings, layers and tasks of `bench float8`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BFLOAT16 = "bfloat16"
ARMS: dict[str, tuple[str, ...]] = {
    BFLOAT16: (),
    "current": ("float8.recipe=current",),
    "delayed": ("float8.recipe=delayed",),
    "cached": ("float8.recipe=current", "float8.cache_weights=true"),
}
"""Overrides of each side."""
WORDS = ("llama-tiny", "train.precision=bfloat16", "train.num_microbatches=2", "train.steps=300", "train.seq_len=64",
         "train.lr=1e-3")  # fmt: skip
LAST = 20
"""Last steps of a training, over whose losses the median is taken."""
WITHIN = 0.01
"""Target for the relative increase of the loss over that of bfloat16."""
SIDES = {"current.torchao": "torchao", "current.own": "current", "delayed": "delayed", "cached": "current"}
"""Plan's recipe of each side that is timed on a GPU beside bfloat16: current scaling by torchao's layer and by ours,
delayed scaling, and current scaling with cached weights."""
LAYERS = {"2048": (16384, 2048, 8192), "4096": (8192, 4096, 14336)}
"""Tokens, width and inner width of the feed-forward layers that are timed on a GPU."""


@dataclass(frozen=True)
class LossTask:
    """Training of all sides, with one seed per round."""

    result: Path
    words: tuple[str, ...] = WORDS
    device: str = "cpu"
    rounds: int = 1


@dataclass(frozen=True)
class LayerTask:
    """Times of feed-forward layers on a GPU."""

    result: Path
    rounds: int = 7
    steps: int = 20
