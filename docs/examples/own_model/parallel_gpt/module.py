"""The plain module, unaware of device meshes. Shapes: b batch, t time, d width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.nn.linear import Linear
from meshwright.nn.step_handles import AuxiliaryLoss, StepBuffer
from parallel_gpt.config import GptConfig


class Attention(nn.Module):
    def __init__(self, c: GptConfig) -> None:
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.wq, self.wk, self.wv = (Linear(c.dim, c.dim) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)
        self.wo = Linear(c.dim, c.dim, bias=True)

    def forward(self, x_btd: Tensor) -> Tensor:
        # The number of heads is inferred from the output, because tensor parallelism shards them.
        q, k, v = (w(x_btd).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        out: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, c: GptConfig) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(c.dim, c.ffn_dim, bias=True), Linear(c.ffn_dim, c.dim, bias=True)

    def forward(self, x_btd: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x_btd)))
        return out


class Block(nn.Module):
    def __init__(self, c: GptConfig) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(c.dim), Attention(c), Mlp(c)
        self.activation = AuxiliaryLoss("activation", c.activation_weight)

    def forward(self, x_btd: Tensor) -> Tensor:
        y_btd = self.norm(x_btd)
        x_btd = x_btd + self.attention(y_btd) + self.mlp(y_btd)
        out: Tensor = self.activation(x_btd, x_btd.square().mean((1, 2)).sum())  # a sum over samples
        return out


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
        x = inputs
        if self.part.is_first:
            self.seen.add(torch.bincount(inputs.flatten(), minlength=len(self.seen.value)))
            x = self.embed(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.part.is_last else x
