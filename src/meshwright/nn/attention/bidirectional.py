"""Bidirectional multi-head self-attention with biases, as in a vision transformer (Dosovitskiy et al. 2021).

The keys alone have none: it would add the same to all of a query's scores, which the softmax takes out again. Its
gradient would be nothing but rounding, different on every layout, which Adam would blow up to whole steps.

Shapes: b batch, t time, d model width, n heads, h head_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.linear import Linear


class BidirectionalAttention(nn.Module):
    """Every position attends to all.

    The number of heads is read from the projections' output, not kept, so that tensor parallel can hand each rank
    its share of the heads.
    """

    def __init__(self, dim: int, *, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, num_heads * head_dim, bias=True)
        self.wk = Linear(dim, num_heads * head_dim)
        self.wv = Linear(dim, num_heads * head_dim, bias=True)
        self.wo = Linear(num_heads * head_dim, dim, bias=True)

    def forward(self, x_btd: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]."""
        q_bnth, k_bnth, v_bnth = (
            w(x_btd).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out_bnth = F.scaled_dot_product_attention(q_bnth, k_bnth, v_bnth)
        out: Tensor = self.wo(out_bnth.transpose(1, 2).flatten(2))
        return out
