"""Merge of attention over disjoint sets of keys, as in online softmax (Milakov and Gimelshein 2018) and ring attention
(Liu et al. 2023).

Shapes: b batch, s queries, n heads, h head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge(out_a_bsnh: Tensor, lse_a_bns: Tensor, out_b_bsnh: Tensor, lse_b_bns: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and lse of attention over both sets of keys; differentiable in all arguments.

    Rows without keys have an lse of -inf and don't contribute, also not to gradients. The result is computed in the
    dtype of lse and returned in the outputs' promoted dtype: give float32 outputs to accumulate many.
    """
    # A constant shift: it cancels in the result, so it needs no gradient.
    shift = torch.maximum(lse_a_bns, lse_b_bns).detach()
    shift = shift.masked_fill(shift == -math.inf, 0)
    weight_a, weight_b = (lse_a_bns - shift).exp(), (lse_b_bns - shift).exp()
    total = weight_a + weight_b
    hidden = total == 0
    total = total.masked_fill(hidden, 1)
    lse_bns = (shift + total.log()).masked_fill(hidden, -math.inf)
    share_a, share_b = ((weight / total).transpose(1, 2)[..., None] for weight in (weight_a, weight_b))
    out = share_a * out_a_bsnh + share_b * out_b_bsnh
    return out.to(torch.promote_types(out_a_bsnh.dtype, out_b_bsnh.dtype)), lse_bns
