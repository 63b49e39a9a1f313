"""Causal self-attention with grouped queries (Ainslie et al. 2023).

Shapes: b batch, t time, d model width, n heads, h head_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.attention.rope import apply_rotary_emb
from meshwright.nn.linear import Linear


class CausalAttention(nn.Module):
    """Causal grouped-query attention.

    The number of heads is inferred from the projections' output, so that tensor parallelism can shard the heads.
    """

    def __init__(self, dim: int, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, num_heads * head_dim)
        self.wk = Linear(dim, num_kv_heads * head_dim)
        self.wv = Linear(dim, num_kv_heads * head_dim)
        self.wo = Linear(num_heads * head_dim, dim)

    def forward(self, x_btd: Tensor, cos_th: Tensor, sin_th: Tensor) -> Tensor:
        """Attend from each position to itself and earlier ones; maps [b, t, d] to [b, t, d]."""
        q_btnh, k_btnh, v_btnh = (w(x_btd).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_btnh, k_btnh = apply_rotary_emb(q_btnh, cos_th, sin_th), apply_rotary_emb(k_btnh, cos_th, sin_th)
        out_bnth = F.scaled_dot_product_attention(
            q_btnh.transpose(1, 2),
            k_btnh.transpose(1, 2),
            v_btnh.transpose(1, 2),
            is_causal=True,
            enable_gqa=q_btnh.shape[2] != k_btnh.shape[2],
        )
        out: Tensor = self.wo(out_bnth.transpose(1, 2).flatten(2))
        return out
