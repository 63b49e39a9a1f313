"""Models and tasks of `bench recompute`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SMALL = ("train.precision=float32", "model.num_layers=2", "model.dim=256")
MODELS: dict[str, tuple[str, ...]] = {
    "decoder": ("llama-tiny", *SMALL, "model.ffn_dim=768", "train.seq_len=256", "train.global_batch=8"),
    "experts": ("moe-tiny", *SMALL, "model.expert_dim=384", "train.seq_len=256", "train.global_batch=8"),
    "diffusion": ("dit-digits", *SMALL, "data.source=digits", "model.ffn_dim=1024",
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
