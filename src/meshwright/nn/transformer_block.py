"""A pre-norm transformer block with a SwiGLU feed-forward layer (Shazeer 2020), and multi-head self-attention with
grouped queries (Ainslie et al. 2023), for causal and bidirectional models.

Shapes: b batch, t tokens, d model width, n heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.attention.attention import AttentionCore, LocalAttention
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.attention.positions import RotaryEmbedding, apply_rotary_emb, token_rows
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


@dataclass(frozen=True)
class TokenContext:
    """Tensors that a block needs besides its stream, the same for all layers with the same mask rules."""

    mask: Any
    """Return value of the attention core's `prepare`."""
    cos: Tensor | None = None
    sin: Tensor | None = None
    """Rotation of queries and keys, [t, h/2] or [b, t, h/2]."""
    rows_bt: Tensor | None = None
    """Numbers of the stream's tokens, for dropout; None if nothing is dropped."""


class Attention(nn.Module):
    """Self-attention; the mask's rules are the layer's, its documents the micro-batch's.

    The number of heads is inferred from the projections' output, so that tensor parallelism can shard the heads.
    Context parallelism replaces `core`.
    """

    core: AttentionCore

    def __init__(
        self, dim: int, *, num_heads: int, num_kv_heads: int, head_dim: int, mask: MaskSpec, bias: bool = False
    ) -> None:
        super().__init__()
        # Keys have no bias: it would add a constant to all scores of a query, which the softmax cancels, and its
        # gradient would be pure rounding error that differs between layouts and that Adam would amplify to full-sized
        # updates.
        self.head_dim, self.mask, self.core = head_dim, mask, LocalAttention()
        self.wq = Linear(dim, num_heads * head_dim, bias=bias)
        self.wk = Linear(dim, num_kv_heads * head_dim)
        self.wv = Linear(dim, num_kv_heads * head_dim, bias=bias)
        self.wo = Linear(num_heads * head_dim, dim, bias=bias)

    def request(self, device: torch.device, dtype: torch.dtype) -> AttentionRequest:
        """Return what this layer asks of a backend."""
        num_heads, num_kv_heads = (w.out_features // self.head_dim for w in (self.wq, self.wk))
        name = str(dtype).removeprefix("torch.")
        return AttentionRequest(
            device.type, name, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=self.head_dim
        )

    def forward(self, x_btd: Tensor, tokens: TokenContext) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        q_btnh, k_btnh, v_btnh = (w(x_btd).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if tokens.cos is not None and tokens.sin is not None:
            q_btnh = apply_rotary_emb(q_btnh, tokens.cos, tokens.sin)
            k_btnh = apply_rotary_emb(k_btnh, tokens.cos, tokens.sin)
        out: Tensor = self.wo(self.core(q_btnh, k_btnh, v_btnh, tokens.mask).flatten(2))
        return out


def token_contexts(
    blocks: Iterable[nn.Module], layout: TokenLayout, *, rotary: RotaryEmbedding | None = None, device: torch.device,
    dtype: torch.dtype, drops: bool = False,
) -> list[TokenContext]:  # fmt: skip
    """Return the context of each block of a stage, each with one attention layer; blocks with the same rules share it.

    `dtype` is that of the computation, and `drops` tells whether elements are dropped in this forward.
    """
    cos, sin = (None, None) if rotary is None else rotary.tables(layout, device=device, dtype=dtype)
    rows_bt, contexts = token_rows(layout, device=device) if drops else None, {}
    found = []
    for block in blocks:
        [layer] = [module for module in block.modules() if isinstance(module, Attention)]
        rules = layer.mask
        if rules not in contexts:
            request = layer.request(device, dtype)
            mask = layer.core.prepare(replace(rules, documents=layout.documents), layout, device, request)
            contexts[rules] = TokenContext(mask, cos, sin, rows_bt)
        found.append(contexts[rules])
    return found
