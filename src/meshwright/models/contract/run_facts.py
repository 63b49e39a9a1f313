"""What a family is told of a run: its own sections, the mesh, lengths and names of dtypes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshwright.mesh.axes import Axes
from meshwright.settings.section import Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class DataFacts:
    """Where samples come from, as the section `data` says."""

    source: str
    tokenizer: str
    token_dtype: str
    cache_dir: str | None


@dataclass(frozen=True)
class RunFacts:
    """A run, as far as a family may know it."""

    sections: Mapping[str, Section]
    """The family's own, by name; `model` is one of them."""
    axes: Axes
    sequence_parallel: bool
    seq_len: int
    global_batch: int
    validation_samples: int
    sample_tokens: int
    seed: int
    precision: str
    """The dtype of activations: float32, bfloat16 or float64."""
    freeze: tuple[str, ...]
    data: DataFacts

    def section(self, kind: type[S]) -> S:
        """The family's section of this type."""
        return next(section for section in self.sections.values() if isinstance(section, kind))

    @property
    def master_precision(self) -> str:
        """The dtype of parameters and optimizer state."""
        return "float32" if self.precision == "bfloat16" else self.precision
