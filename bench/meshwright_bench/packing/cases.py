"""Samples and tasks of `bench packing`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STREAM, PACKED, ALONE = "stream", "packed", "alone"
"""Sides: windows of one stream, packed documents, and one document per sample with padding behind it."""

MODEL = ("llama-tiny", "train.device=cpu", "train.precision=float32")
SAMPLES = {2048: 4, 8192: 1, 16384: 1}
"""Samples of a step by their number of tokens."""


@dataclass(frozen=True)
class PackingTask:
    """Measurement of one length of samples."""

    result: Path
    words: tuple[str, ...]
    rounds: int = 5
    steps: int = 1


def words_for(seq_len: int) -> tuple[str, ...]:
    """Return the preset and overrides for a length of samples."""
    return (*MODEL, f"train.seq_len={seq_len}", f"train.global_batch={SAMPLES[seq_len]}")
