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
LAYERS = {"square": (8192, 4096, 4096), "wide": (8192, 4096, 14336)}
"""Tokens, input and output features of the linear layers that are timed on a GPU."""


@dataclass(frozen=True)
class LossTask:
    """Training of all sides, with one seed per round."""

    result: Path
    words: tuple[str, ...] = WORDS
    device: str = "cpu"
    rounds: int = 1


@dataclass(frozen=True)
class LayerTask:
    """Times of linear layers on a GPU."""

    result: Path
    rounds: int = 7
    steps: int = 20
