"""The family of mixture-of-experts language models: Mixtral (Jiang et al. 2024), and models like DeepSeek-V3 (2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from meshwright.models.contract.family import OtherWeights
from meshwright.models.contract.initial_values import ZEROS, Fill, Normal
from meshwright.models.contract.model_facts import ModelFacts, Part
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.tp_styles import DIVIDED, FINAL_REGION, Style, local
from meshwright.models.decoder.decoder_family import BLOCK_STYLES, INIT_STD, STYLES, DecoderFamily
from meshwright.models.moe.config import FOREIGN_NAMES, MoeConfig
from meshwright.models.moe.description import BLOCK, WINDOW_BLOCK, describe
from meshwright.models.moe.rules import violations
from meshwright.settings.violation import Violation

if TYPE_CHECKING:
    from torch import nn

MOE_STYLES: Mapping[str, Style] = {
    **{path: style for path, style in BLOCK_STYLES.items() if not path.startswith("ffn.") and path != "ffn"},
    "moe": FINAL_REGION,
    "moe.router.gate": DIVIDED,
    "moe.experts": local(gate=1, up=1, down=2),
}
SHARED_STYLES: Mapping[str, Style] = {
    "moe.shared.gate": local(weight=0),
    "moe.shared.up": local(weight=0),
    "moe.shared.down": local(weight=1),
}


class MoeFamily(DecoderFamily):
    """Mixture-of-experts language models, trained on text."""

    sections = {"model": MoeConfig}
    foreign_names = FOREIGN_NAMES

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Check dimensions, routing and the mesh."""
        return violations(f.section(MoeConfig), f)

    def describe(self, f: RunFacts) -> ModelFacts:
        """Describe the model's parameters and costs."""
        model = f.section(MoeConfig)
        return describe(model.spec(), model.router(), f.seq_len)

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """Return Megatron's styles for attention; inside a layer with experts, columns of every expert are sharded."""
        shared = SHARED_STYLES if f.section(MoeConfig).num_shared_experts else {}
        block = {**MOE_STYLES, **shared}
        return {**STYLES, BLOCK: block, WINDOW_BLOCK: block}

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        """Build the plain module."""
        from meshwright.models.moe.module import MoeTransformer

        model = f.section(MoeConfig)
        return MoeTransformer(model.spec(), model.router(), part, dropout=f.dropout, seed=f.seed)

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return initial values as for dense layers; load and balancing bias start at zero."""
        if ".load." in name:
            return ZEROS
        if name.endswith("experts.down"):
            return Normal(INIT_STD / math.sqrt(2.0 * f.section(MoeConfig).num_layers))
        return super().initial(f, name)

    def other_weights(self) -> OtherWeights:
        """Return import and export of Hugging Face's Mixtral."""
        from meshwright.models.huggingface.weights import HuggingFaceWeights
        from meshwright.models.moe.hf_mixtral import MIXTRAL

        return HuggingFaceWeights(MIXTRAL)


FAMILY = MoeFamily()
