"""Progress reporting for runs: the command line has its own `Reporter`, and programs may pass another.

Torch-free, since the launcher imports the reporter class and only rank 0 instantiates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.models.contract.loss_unit import LossUnit
from meshwright.plan.traffic import Traffic


@dataclass(frozen=True)
class Start:
    """Facts about a run that is about to start."""

    name: str
    num_params: int
    corpus: str
    mesh: str
    num_ranks: int
    device: str
    backend: str | None
    """Communication backend; None for a single rank."""
    global_batch: int
    seq_len: int
    """Tokens per sample."""
    steps: int
    predicted_bytes: int
    """Predicted memory per rank, including Python and PyTorch on the CPU."""
    traffic: Traffic
    """Predicted bytes per step, on the rank that sends most."""
    folder: Path
    unit: LossUnit


@dataclass(frozen=True)
class Progress:
    """Progress of a run after a step."""

    step: int
    steps: int
    loss: float
    """In the task's own unit, such as nats per token; `Start.unit` converts it to the unit of `metrics.jsonl`."""
    grad_norm: float
    tokens_per_s: float
    memory_bytes: int
    eta_s: float
    skipped: bool
    expert_load: float | None = None
    """Largest number of tokens of an expert over the mean of its layer; None without mixture-of-experts layers."""


@dataclass(frozen=True)
class Validation:
    """Result of a validation."""

    loss: float
    """In the task's own unit, as in `Progress`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics by name."""
    images: Mapping[str, Path] = field(default_factory=dict)
    """Image files by name."""


@dataclass(frozen=True)
class CountedBytes:
    """Bytes that rank 0 sent for a purpose in its steps, and two predictions of them."""

    purpose: str
    sent: int
    predicted: int
    """Prediction before the run."""
    explained: int
    """Prediction from what was found in these steps."""
    basis: str
    """What was found: the load of the experts, the documents of the samples; empty if all was known before."""


@dataclass(frozen=True)
class Summary:
    """Summary at the end of a run."""

    steps: int
    seconds: float
    validation: Validation | None
    steps_here: int
    """Steps run by this process, excluding those before the checkpoint it resumed from."""
    traffic: Traffic
    """Predicted bytes per step, as in `Start`."""
    counted: Traffic | None
    """Bytes sent by this rank's compressed collectives in these steps; None without compression."""
    folder: Path
    checkpoint: Path | None
    sample: str | None
    all_to_alls: tuple[CountedBytes, ...] = ()
    """Bytes of experts and of context parallelism."""
    plan_given: bool = False
    """True if the plan was read from a file and differs from the one made from the configuration."""
    figures: tuple[str, ...] = ("loss.png",)
    """File names of the figures in the run folder."""


class Reporter:
    """Base class of reporters; ignores all events."""

    def started(self, start: Start) -> None:
        """Handle the start of the run, before the model is built."""

    def note(self, text: str) -> None:
        """Show a message to the user."""

    def waiting(self, text: str) -> None:
        """Show the reason for a long wait."""

    def progress(self, progress: Progress) -> None:
        """Handle the completion of a step."""

    def validated(self, step: int, validation: Validation) -> None:
        """Handle a validation result."""

    def saved(self, step: int, checkpoint: Path, seconds: float) -> None:
        """Handle a checkpoint, which took `seconds` to write."""

    def measured(self, facts: Mapping[str, Any]) -> None:
        """Handle what was measured in some of the steps, as JSON values."""

    def finished(self, summary: Summary) -> None:
        """Handle the end of a successful run."""
