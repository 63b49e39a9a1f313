"""Blocks and the context of their tokens, for tests."""

from __future__ import annotations

import torch

from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.attention.positions import RotaryEmbedding
from meshwright.nn.transformer_block import Attention, TransformerBlock, token_contexts

CAUSAL = MaskSpec(causal=True)


def make_attention(dim, *, num_heads, num_kv_heads, head_dim, mask=CAUSAL, **options):
    return Attention(dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, mask=mask, **options)


def make_block(dim, *, num_heads=4, num_kv_heads=2, head_dim=4, ffn_dim=24, mask=CAUSAL):
    attention = make_attention(dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, mask=mask)
    return TransformerBlock(attention, dim, ffn_dim=ffn_dim, norm_eps=1e-5)


def context(attention, layout, dtype, *, theta=10000.0, rotary=True):
    """The context of an attention layer; `layout` may be a number of tokens."""
    layout = TokenLayout(layout) if isinstance(layout, int) else layout
    embedding = RotaryEmbedding(attention.head_dim, theta) if rotary else None
    (found,) = token_contexts([attention], layout, rotary=embedding, device=torch.device("cpu"), dtype=dtype)
    return found
