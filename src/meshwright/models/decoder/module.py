"""A decoder (Touvron et al. 2023; Grattafiori et al. 2024) as a plain module.

Independent of meshes, precision policies and checkpointing, which `parallel/` applies from outside. Parameters have the
same names as in checkpoints.

Shapes: b batch, t time, d model width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.decoder.description import DecoderSpec
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.attention.positions import RopeScaling, RotaryEmbedding
from meshwright.nn.dropout_add.module import BlockDropout
from meshwright.nn.linear import Linear
from meshwright.nn.transformer_block import Attention, TransformerBlock, token_contexts


def make_block(spec: DecoderSpec, layer: int, dropout: BlockDropout) -> TransformerBlock:
    attention = make_attention(spec, layer)
    return TransformerBlock(attention, spec.dim, ffn_dim=spec.ffn_dim, norm_eps=spec.norm_eps, dropout=dropout)


def make_attention(spec: DecoderSpec, layer: int) -> Attention:
    return Attention(
        spec.dim,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        mask=MaskSpec(causal=True, window=spec.window_of(layer)),
    )


MakeBlock = Callable[[Any, int, BlockDropout], nn.Module]
"""Function that creates the block of a layer, given the model's dimensions and the layer's dropout."""


class Decoder(nn.Module):
    """Token embedding, blocks, final norm and output head, or the part of them in one pipeline stage.

    Parameters of a part keep their names from the full model. With tied embeddings, a part that has the head but not
    the embedding holds its own replica of the weight.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        part: Part | None = None,
        *,
        dropout: float = 0.0,
        seed: int = 0,
        block: MakeBlock = make_block,
    ) -> None:
        """`dropout` is the probability for an element of a block's branches, and `block` creates the block of a
        layer."""
        super().__init__()
        self._drops = dropout > 0
        self.spec, self.part = spec, part or Part(range(spec.num_layers))
        if self.part.is_first:
            self.embed = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleDict(
            {str(layer): block(spec, layer, BlockDropout(dropout, seed, layer)) for layer in self.part.layers}
        )
        if self.part.is_last:
            self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
            self.head = Linear(spec.dim, spec.vocab_size)
            if spec.tie_embeddings and self.part.is_first:
                self.head.weight = self.embed.weight
        scaling = None if spec.rope_scaling is None else RopeScaling(**asdict(spec.rope_scaling))
        self._rotary = RotaryEmbedding(spec.head_dim, spec.rope_theta, scaling)

    def forward(self, inputs: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Compute next-token logits [b, t, v] from token ids [b, t].

        Parts other than the first take the residual stream [b, t, d] as input; parts other than the last return it.
        Without a `layout`, each sample is a single document.
        """
        x_btd: Tensor = self.embed(inputs) if self.part.is_first else inputs
        contexts = token_contexts(
            self.blocks.values(),
            layout or TokenLayout(inputs.shape[1]),
            rotary=self._rotary,
            device=inputs.device,
            dtype=x_btd.dtype,
            drops=self._drops and self.training,
        )
        for block, tokens in zip(self.blocks.values(), contexts, strict=True):
            x_btd = block(x_btd, tokens)
        return self.head(self.norm(x_btd)) if self.part.is_last else x_btd
