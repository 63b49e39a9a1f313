"""Run settings passed to a family: its own sections, the mesh, lengths and dtype names. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshwright.mesh.axes import Axes
from meshwright.settings.section import Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class DataFacts:
    """Source of the samples, from the `data` section."""

    source: str
    tokenizer: str
    token_dtype: str
    packing: str
    """Kind of samples of text: none or documents."""
    separator: int | None
    """Last token of each document: of a token file; of text, in place of what the tokenizer declares."""
    bos: str
    """Beginning of each document of text: auto, as the tokenizer frames it, or none."""
    text_field: str | None
    """Field that is the text of each record of JSON lines, Parquet or a saved dataset."""
    chat_field: str | None
    """Field that is the conversation of each record, in place of a text."""
    validation_source: str | None
    """Source to validate with, in place of a held-out part."""
    mixture: tuple[str, ...]
    """Sources with weights, in place of `source`."""
    when_exhausted: str
    """Behaviour when all of a source was read: wrap or end."""
    cache_dir: str | None


@dataclass(frozen=True)
class RunFacts:
    """Settings of a run that a family may depend on."""

    sections: Mapping[str, Section]
    """The family's own sections by name, including `model`."""
    axes: Axes
    sequence_parallel: bool
    steps: int
    seq_len: int
    global_batch: int
    num_microbatches: int
    validation_samples: int
    sample_tokens: int
    sample_prompt: str | None
    """Text that the generated text continues; None if the task chooses."""
    seed: int
    dropout: float
    """Probability of dropping an element of a block's branches before they are added to the stream."""
    precision: str
    """Dtype of activations: float32, bfloat16 or float64."""
    freeze: tuple[str, ...]
    data: DataFacts
    trains: bool = True
    """Whether the model is trained, and not only evaluated: then no data may be on both sides."""

    def section(self, kind: type[S]) -> S:
        """Return the family's section of this type."""
        return next(section for section in self.sections.values() if isinstance(section, kind))

    @property
    def master_precision(self) -> str:
        """Dtype of parameters and optimizer state."""
        return "float32" if self.precision == "bfloat16" else self.precision


@dataclass(frozen=True)
class Prompt:
    """What to generate, from a model that generates text."""

    text: str
    num_tokens: int
    """Most tokens to generate."""
    temperature: float
    """Temperature of sampling; 0 takes the likeliest token."""
    is_chat: bool = False
    """Whether the text is what a user says, in the tokenizer's chat template."""
