"""Llama (Touvron et al. 2023; The Llama 3 herd of models, 2024) as a plain module.

It knows no mesh, no precision policy and no checkpointing: `parallel/` lays it on a mesh by its building blocks.
Parameter names are the checkpoint's names.

Shapes: b batch, t time, d model width, v vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import Tensor, nn

from meshwright.models.spec import LlamaSpec
from meshwright.nn.attention.rope import Stretch, rope_tables
from meshwright.nn.block import TransformerBlock

INIT_STD = 0.02


class Llama(nn.Module):
    """Token embedding, blocks, final norm and output head."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                spec.dim,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                ffn_dim=spec.ffn_dim,
                norm_eps=spec.norm_eps,
            )
            for _ in range(spec.num_layers)
        )
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.head = nn.Linear(spec.dim, spec.vocab_size, bias=False)
        scaling = spec.rope_scaling
        self._stretch = None if scaling is None else Stretch(**asdict(scaling))
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, when the spec says so.

        Anything that replaces parameters (laying on a mesh, leaving the meta device) calls this again.
        """
        if self.spec.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Next-token logits [b, t, v] of token ids [b, t]."""
        x_btd: Tensor = self.embed(tokens_bt)
        cos_th, sin_th = rope_tables(
            tokens_bt.shape[1],
            self.spec.head_dim,
            theta=self.spec.rope_theta,
            stretch=self._stretch,
            device=tokens_bt.device,
            dtype=x_btd.dtype,
        )
        for block in self.blocks:
            x_btd = block(x_btd, cos_th, sin_th)
        logits: Tensor = self.head(self.norm(x_btd))
        return logits

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


def build_llama(spec: LlamaSpec, *, dtype: torch.dtype) -> Llama:
    """The module on the meta device, with parameters of `dtype` and no storage."""
    with torch.device("meta"):
        return Llama(spec).to(dtype)
