"""Reference attention: softmax in plain operations with at least float32, the oracle of the other backends.

It takes memory for all scores. Shapes: b batch, s queries, t keys, n heads, m key/value heads, g queries per key/value
head, h head_dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_attention(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, visible_bst: Tensor, *, scale: float, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return outputs [b, s, n, h] in the inputs' dtype, and lse [b, n, s] in at least float32.

    Args:
        q_bsnh: queries.
        k_btmh: keys.
        v_btmh: values.
        visible_bst: True for the keys that a query may attend to, for all samples or for each.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    exact = torch.promote_types(q_bsnh.dtype, torch.float32)
    b, s, n, h = q_bsnh.shape
    m = k_btmh.shape[2]
    q_bsmgh = q_bsnh.to(exact).reshape(b, s, m, n // m, h)
    scores = torch.einsum("bsmgh,btmh->bmgst", q_bsmgh * scale, k_btmh.to(exact))
    scores = scores.masked_fill(~visible_bst[:, None, None], -math.inf)
    # A constant shift: it cancels in the result, so it needs no gradient.
    shift = scores.detach().amax(-1, keepdim=True)
    shift = shift.masked_fill(shift == -math.inf, 0)
    weights = (scores - shift).exp()
    total = weights.sum(-1, keepdim=True)
    hidden = total == 0
    total = total.masked_fill(hidden, 1)
    lse_bmgs = (shift + total.log()).masked_fill(hidden, -math.inf).squeeze(-1)
    out = torch.einsum("bmgst,btmh->bsmgh", F.dropout(weights / total, dropout_p), v_btmh.to(exact))
    return out.flatten(2, 3).to(q_bsnh.dtype), lse_bmgs.flatten(1, 2)
