"""A pre-norm transformer block with a SwiGLU feed-forward layer (Shazeer 2020).

Shapes: b batch, t time, d model width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.attention.module import Attention, TokenContext
from meshwright.nn.dropout_add.module import NO_DROPOUT, BlockDropout
from meshwright.nn.linear import Linear


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer: down(silu(gate(x)) · up(x))."""

    def __init__(self, dim: int, *, ffn_dim: int) -> None:
        super().__init__()
        self.gate = Linear(dim, ffn_dim)
        self.up = Linear(dim, ffn_dim)
        self.down = Linear(ffn_dim, dim)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        out: Tensor = self.down(F.silu(self.gate(x_btd)) * self.up(x_btd))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, attention: Attention, dim: int, *, ffn_dim: int, norm_eps: float, dropout: BlockDropout = NO_DROPOUT
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.attention_add, self.ffn_add = dropout.adds()
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn = FeedForward(dim, ffn_dim=ffn_dim)

    def forward(self, x_btd: Tensor, tokens: TokenContext) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        x_btd = self.attention_add(self.attention(self.attention_norm(x_btd), tokens), x_btd, tokens.rows_bt)
        out: Tensor = self.ffn_add(self.ffn(self.ffn_norm(x_btd)), x_btd, tokens.rows_bt)
        return out
