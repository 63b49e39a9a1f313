"""Bidirectional multi-head self-attention with biases, as in a vision transformer (Dosovitskiy et al. 2021).

The key projection has no bias: a bias would add a constant to all scores of a query, which the softmax cancels. Its
gradient would be pure rounding error that differs between layouts, and Adam would amplify it to full-sized updates.

Shapes: b batch, t time, d model width, n heads, h head_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.linear import Linear


class BidirectionalAttention(nn.Module):
    """Multi-head self-attention over all positions.

    The number of heads is inferred from the projections' output, so that tensor parallelism can shard the heads.
    """

    def __init__(self, dim: int, *, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, num_heads * head_dim, bias=True)
        self.wk = Linear(dim, num_heads * head_dim)
        self.wv = Linear(dim, num_heads * head_dim, bias=True)
        self.wo = Linear(num_heads * head_dim, dim, bias=True)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        q_bnth, k_bnth, v_bnth = (
            w(x_btd).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out_bnth = F.scaled_dot_product_attention(q_bnth, k_bnth, v_bnth)
        out: Tensor = self.wo(out_bnth.transpose(1, 2).flatten(2))
        return out
