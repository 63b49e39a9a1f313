"""shim"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshwright.nn.attention.attention_mask import AttentionMask


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, backend: str = "auto") -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask.dense is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1])
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
