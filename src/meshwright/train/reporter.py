"""What a run tells whoever watches it. The command line shows it; a program may pass its own.

Torch-free: the launcher names the reporter, rank 0 makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Facts:
    """What a run is about to do."""

    name: str
    num_params: int
    corpus: str
    mesh: str
    num_ranks: int
    device: str
    backend: str | None
    """What moves bytes between ranks; None for a single rank."""
    global_batch: int
    seq_len: int
    steps: int
    predicted_bytes: int
    """Memory a rank, predicted, with what Python and PyTorch take on the CPU."""
    folder: Path


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    """In nats a token."""
    bits_per_byte: float | None
    grad_norm: float
    tokens_per_s: float
    memory_bytes: int
    eta_s: float
    skipped: bool


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    steps: int
    seconds: float
    validation_loss: float | None
    """In nats a token."""
    validation_bits_per_byte: float | None
    folder: Path
    checkpoint: Path | None
    sample: str | None


class Reporter:
    """Says nothing; the base of those that do."""

    def started(self, facts: Facts) -> None:
        """Once, before the model is built."""

    def note(self, text: str) -> None:
        """A fact a person should see once."""

    def waiting(self, text: str) -> None:
        """What a longer wait is for."""

    def progress(self, progress: Progress) -> None:
        """After every step."""

    def validated(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """After a validation; loss in nats a token."""

    def finished(self, summary: Summary) -> None:
        """At the end of a run that ended well."""
