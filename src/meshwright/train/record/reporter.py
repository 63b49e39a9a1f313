"""What a run tells whoever watches it. The command line shows it; a program may pass its own.

Torch-free: the launcher names the reporter, rank 0 makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.models.contract.loss_unit import LossUnit
from meshwright.plan.traffic import Traffic


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
    """Tokens a sample."""
    steps: int
    predicted_bytes: int
    """Memory a rank, predicted, with what Python and PyTorch take on the CPU."""
    traffic: Traffic
    """What a rank sends in a step, predicted: the one that sends most."""
    folder: Path
    unit: LossUnit


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    memory_bytes: int
    eta_s: float
    skipped: bool


@dataclass(frozen=True)
class Validation:
    """What held-out samples show."""

    loss: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """More of them, by name."""


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    steps: int
    seconds: float
    validation: Validation | None
    steps_here: int
    """Without those of a run that this one went on from."""
    traffic: Traffic
    """What a rank sends in a step, predicted, as in the facts."""
    counted: Traffic | None
    """What compressed collectives have sent from this rank in all these steps; None without compression."""
    folder: Path
    checkpoint: Path | None
    sample: str | None
    plan_given: bool = False
    """The plan is not the one that the configuration makes: it came from a file."""


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

    def validated(self, step: int, validation: Validation) -> None:
        """After a validation."""

    def finished(self, summary: Summary) -> None:
        """At the end of a run that ended well."""
