"""What a proof is asked. Torch-free: the launcher makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.config.breach import as_words
from meshwright.config.rules_comm import lossless_value, lossy_keys
from meshwright.config.schema import DiTConfig, RunConfig
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class ProofSpec:
    """What is proved, and where its parts meet."""

    config: RunConfig
    num_steps: int
    folder: Path
    """Ranks leave their records here, the comparison its result."""

    def record(self, rank: int) -> Path:
        """The file of a rank's record."""
        return self.folder / f"rank-{rank}.pt"

    @property
    def result(self) -> Path:
        """The file of the result, as JSON: `report`, the interface, and `lines`, what a person reads."""
        return self.folder / "result.json"


def as_proof(config: RunConfig) -> RunConfig:
    """The run as it is proved: float64, on the CPU, everything else as given.

    But for gates that start at zero: nearly all gradients of the first step are zero behind them, and a proof of zeros
    proves nothing.

    Raises:
        ConfigError: gradients or weights lose digits between ranks.
    """
    lossy = lossy_keys(config)
    if lossy:
        raise ConfigError(
            f"a proof with {' and '.join(lossy)} that lose digits on the way",
            where=", ".join(lossy),
            rule="a layout is proved to compute what one device does; exact-via-all-to-all goes the way of compressed "
            "gradients, without loss",
            fix=as_words({key: lossless_value(key) for key in lossy}),
        )
    train = config.train.model_copy(update={"precision": "float64", "device": "cpu", "compile": False})
    model = config.model
    if isinstance(model, DiTConfig):
        model = model.model_copy(update={"zero_init": False})
    return config.model_copy(update={"train": train, "model": model})
