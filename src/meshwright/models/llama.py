"""Llama (Touvron et al. 2023; The Llama 3 herd of models, 2024) as a plain module.

It knows no mesh, no precision policy and no checkpointing: `parallel/` lays it on a mesh by its building blocks.
Parameter names are the checkpoint's names.

Shapes: b batch, t time, d model width, v vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from torch import Tensor, nn

from meshwright.models.part import ModelPart
from meshwright.models.shapes import Part
from meshwright.models.spec import LlamaSpec
from meshwright.nn.attention.rope import Stretch, rope_tables
from meshwright.nn.block import TransformerBlock
from meshwright.nn.linear import Linear
from meshwright.pipeline.shared import SharedParameter

INIT_STD = 0.02


class Llama(ModelPart):
    """Token embedding, blocks, final norm and output head; or the part of them that a pipeline stage has.

    A part's parameters have the names that they have in the whole model. Where the embedding is tied and the part has
    the head but not the embedding, it has a copy of its own under the embedding's name.
    """

    def __init__(self, spec: LlamaSpec, part: Part | None = None) -> None:
        super().__init__(part or Part(range(spec.num_layers)))
        self.spec = spec
        if self.part.is_first:
            self.embed = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleDict(
            {
                str(layer): TransformerBlock(
                    spec.dim,
                    num_heads=spec.num_heads,
                    num_kv_heads=spec.num_kv_heads,
                    head_dim=spec.head_dim,
                    ffn_dim=spec.ffn_dim,
                    norm_eps=spec.norm_eps,
                )
                for layer in self.part.layers
            }
        )
        if self.part.is_last:
            self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
            self.head = Linear(spec.dim, spec.vocab_size)
        scaling = spec.rope_scaling
        self._stretch = None if scaling is None else Stretch(**asdict(scaling))
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, when the spec says so and both are here.

        Anything that replaces parameters (laying on a mesh, leaving the meta device) calls this again.
        """
        if self.spec.tie_embeddings and self.part.is_first and self.part.is_last:
            self.head.weight = self.embed.weight

    def shared_parameters(self) -> tuple[SharedParameter, ...]:
        """What the parts of this model share: declared here, and the same on every part."""
        return self.spec.shared_parameters(self.part.num_stages)

    def forward(self, inputs: Tensor, seq_len: int | None = None) -> Tensor:
        """Next-token logits [b, t, v] of token ids [b, t].

        A part that isn't the first takes the stream [b, t, d] instead, one that isn't the last gives it. Where the
        stream is divided along the sequence, `seq_len` is the whole length t.
        """
        x_btd: Tensor = self.embed(inputs) if self.part.is_first else inputs
        cos_th, sin_th = rope_tables(
            seq_len or inputs.shape[1],
            self.spec.head_dim,
            theta=self.spec.rope_theta,
            stretch=self._stretch,
            device=inputs.device,
            dtype=x_btd.dtype,
        )
        for block in self.blocks.values():
            x_btd = block(x_btd, cos_th, sin_th)
        return self.head(self.norm(x_btd)) if self.part.is_last else x_btd

    def initial_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None for a norm's weight, which starts at one.

        Products that write into the residual stream start smaller, so that its variance does not grow with depth
        (GPT-2; Radford et al. 2019, section 2.3).
        """
        if "norm" in name:
            return None
        if name.endswith(("wo.weight", "down.weight")):
            return INIT_STD / math.sqrt(2.0 * self.spec.num_layers)
        return INIT_STD
