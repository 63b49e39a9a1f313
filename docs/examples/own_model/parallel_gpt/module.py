"""The plain module, unaware of device meshes. Shapes: b batch, t time, d width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.nn.attention.attention import LocalAttention
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import token_positions
from meshwright.nn.linear import Linear
from meshwright.nn.step_handles import AuxiliaryLoss, StepBuffer
from parallel_gpt.config import MASK, GptConfig


class Attention(nn.Module):
    def __init__(self, c: GptConfig) -> None:
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.wq, self.wk, self.wv = (Linear(c.dim, c.dim) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)
        self.wo, self.core = Linear(c.dim, c.dim, bias=True), LocalAttention()  # cp replaces the core

    def forward(self, x_btd: Tensor, mask: Any) -> Tensor:
        q, k, v = (w(x_btd).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # tp shards heads
        return self.wo(self.core(self.q_norm(q), self.k_norm(k), v, mask).flatten(2))


class Block(nn.Module):
    def __init__(self, c: GptConfig) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(c.dim), Attention(c)
        self.mlp = nn.Sequential(Linear(c.dim, c.ffn_dim, bias=True), nn.GELU(), Linear(c.ffn_dim, c.dim, bias=True))
        self.activation = AuxiliaryLoss("activation", c.activation_weight)

    def forward(self, x_btd: Tensor, mask: Any, seq_len: int) -> Tensor:
        y_btd = self.norm(x_btd)
        x_btd = x_btd + self.attention(y_btd, mask) + self.mlp(y_btd)
        # A sum over samples of means over all their tokens, of which this rank may hold a part.
        return self.activation(x_btd, x_btd.square().mean(2).sum() / seq_len)


class Gpt(nn.Module):
    def __init__(self, c: GptConfig, part: Part) -> None:
        super().__init__()
        self.part = part
        if part.is_first:
            self.embed, self.positions = nn.Embedding(c.vocab_size, c.dim), nn.Embedding(c.max_len, c.dim)
            self.seen = StepBuffer((c.vocab_size,), torch.int64)
        self.blocks = nn.ModuleDict({str(layer): Block(c) for layer in part.layers})
        if part.is_last:
            self.norm, self.head = nn.LayerNorm(c.dim), Linear(c.dim, c.vocab_size)

    def forward(self, inputs: Tensor, layout: TokenLayout | None = None) -> Tensor:
        x, mask, layout = inputs, None, layout or TokenLayout(inputs.shape[1])
        if self.part.is_first:
            self.seen.add(torch.bincount(inputs.flatten(), minlength=len(self.seen.value)))
            x = self.embed(inputs) + self.positions(token_positions(layout, inputs.device))
        for block in self.blocks.values():
            mask = mask or block.attention.core.prepare(replace(MASK, documents=layout.documents), layout, x.device)
            x = block(x, mask, layout.seq_len)
        return self.head(self.norm(x)) if self.part.is_last else x
