"""Attention by PyTorch's `scaled_dot_product_attention`.

Causal and full masks need no mask tensor. Other masks are dense on CUDA; on CPU, only the blocks that they leave are
computed (`cpu_blocks`).

Shapes: b batch, s queries, t keys, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def sdpa_attention(
    q_bsnh: Tensor, k_btmh: Tensor, v_btmh: Tensor, *, causal: bool, visible_bst: Tensor | None, scale: float | None
) -> Tensor:
    """Return outputs [b, s, n, h].

    Args:
        q_bsnh: queries.
        k_btmh: keys.
        v_btmh: values.
        causal: hide keys after the query; only without `visible_bst`.
        visible_bst: True for the keys that a query may attend to, for all samples or for each; None for a mask that is
            causal or full.
        scale: factor of the scores; None for 1 / sqrt(h).
    """
    out_bnsh = F.scaled_dot_product_attention(
        q_bsnh.transpose(1, 2),
        k_btmh.transpose(1, 2),
        v_btmh.transpose(1, 2),
        attn_mask=None if visible_bst is None else visible_bst[:, None],
        is_causal=causal and visible_bst is None,
        scale=scale,
        enable_gqa=q_bsnh.shape[2] != k_btmh.shape[2],
    )
    return out_bnsh.transpose(1, 2)
