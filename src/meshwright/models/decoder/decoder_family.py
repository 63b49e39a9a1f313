"""Base of families of decoders: description, tensor-parallel styles, initial values, data and task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.models.contract.family import Family
from meshwright.models.contract.initial_values import ONES, Fill, Normal
from meshwright.models.contract.model_facts import ModelFacts, Part
from meshwright.models.contract.run_facts import Prompt, RunFacts
from meshwright.models.contract.tp_styles import COLUMN, FINAL_ROW, HEAD, ROW, STREAM, VOCABULARY, Style, gather
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.description import BLOCK, WINDOW_BLOCK, DecoderSpec, describe
from meshwright.models.decoder.rules import violations
from meshwright.settings.violation import Violation

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from meshwright.data.mixtures.mixture import Text
    from meshwright.models.contract.task import Forward, Reference, Task

INIT_STD = 0.02

BLOCK_STYLES: Mapping[str, Style] = {
    "attention_norm": STREAM,
    "attention": gather(2),
    "attention.wq": COLUMN,
    "attention.wk": COLUMN,
    "attention.wv": COLUMN,
    "attention.wo": ROW,
    "ffn_norm": STREAM,
    "ffn": gather(),
    "ffn.gate": COLUMN,
    "ffn.up": COLUMN,
    "ffn.down": FINAL_ROW,
}
STYLES: Mapping[str, Mapping[str, Style]] = {
    BLOCK: BLOCK_STYLES,
    WINDOW_BLOCK: BLOCK_STYLES,
    "embed": {"embed": VOCABULARY},
    "head": {"norm": STREAM, "head": HEAD},
}


class DecoderFamily(Family):
    """Decoders trained on text. A subclass has a section `model` derived from `DecoderConfig`."""

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Check model dimensions and tensor-parallel divisibility."""
        return violations(f.section(DecoderConfig), f)

    def describe(self, f: RunFacts) -> ModelFacts:
        """Describe the model's parameters and costs."""
        return describe(_spec(f), f.seq_len)

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """Return Megatron's tensor-parallel styles: column-wise, then row-wise (Shoeybi et al. 2019)."""
        return STYLES

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        """Build the plain module."""
        from meshwright.models.decoder.module import Decoder

        return Decoder(_spec(f), part, dropout=f.dropout, seed=f.seed)

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return a parameter's initial distribution, scaled down with depth for projections into the residual stream
        (GPT-2; Radford et al. 2019, section 2.3).
        """
        if "norm" in name:
            return ONES
        if name.endswith(("wo.weight", "down.weight")):
            return Normal(INIT_STD / math.sqrt(2.0 * _spec(f).num_layers))
        return Normal(INIT_STD)

    def open_data(self, f: RunFacts) -> Text:
        """Open the text of the `data` section."""
        from meshwright.models.tasks.text_data import open_text

        return open_text(f, vocab_size=_spec(f).vocab_size)

    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        """Return the next-token task."""
        from meshwright.models.tasks.text_task import text_task

        return text_task(f, data, device)

    def generate(self, f: RunFacts, forward: Forward, prompt: Prompt, folder: Path) -> Mapping[str, Any]:
        """Return the text that follows a prompt."""
        from meshwright.models.tasks.next_token import answer

        return {"text": answer(f, forward, prompt)}

    def reference(self, f: RunFacts, data: Any) -> Reference:
        """Return the reference implementation of the next-token loss."""
        from meshwright.models.tasks.text_task import text_reference

        return text_reference(f, data)


def _spec(f: RunFacts) -> DecoderSpec:
    return f.section(DecoderConfig).spec()
