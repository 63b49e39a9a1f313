"""Models and tasks of `bench recompute`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SMALL = ("train.precision=float32", "model.num_layers=2", "train.sample_tokens=0")
MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("llama-tiny", *SMALL, "model.dim=256", "model.ffn_dim=768", "train.seq_len=256", "train.global_batch=8"),
    "moe": ("moe-tiny", *SMALL, "model.dim=256", "model.expert_dim=384", "train.seq_len=256", "train.global_batch=8"),
    "dit": ("dit-digits", *SMALL[:2], "data.source=digits", "model.dim=256", "model.ffn_dim=1024",
            "train.global_batch=64"),
}  # fmt: skip
"""Preset and overrides of each family."""


@dataclass(frozen=True)
class RecomputeTask:
    """Measurement of one model."""

    result: Path
    words: tuple[str, ...]
    rounds: int = 7
    steps: int = 2
