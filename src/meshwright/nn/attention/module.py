"""Multi-head self-attention with grouped queries (Ainslie et al. 2023), for causal and bidirectional models.

Shapes: b batch, t tokens, d model width, n heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.core import AttentionCore, LocalAttention
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.rope import RotaryEmbedding, apply_rotary_emb
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.nn.dropout_add.token_rows import token_rows
from meshwright.nn.linear import Linear


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
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: MaskSpec,
        bias: bool = False,
    ) -> None:
        """Create the layer.

        Args:
            dim: model width.
            num_heads: query heads.
            num_kv_heads: key/value heads.
            head_dim: width of a head.
            mask: rules of the mask, without documents.
            bias: whether queries, values and outputs have biases. Keys have none: a key's bias would add a constant to
                all scores of a query, which the softmax cancels, and its gradient would be pure rounding error that
                differs between layouts and that Adam would amplify to full-sized updates.
        """
        super().__init__()
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
    blocks: Iterable[nn.Module],
    layout: TokenLayout,
    *,
    rotary: RotaryEmbedding | None = None,
    device: torch.device,
    dtype: torch.dtype,
    drops: bool = False,
) -> list[TokenContext]:
    """Return the context of each block of a stage; blocks with the same rules share it.

    Args:
        blocks: blocks in order, each with one attention layer.
        layout: tokens of the micro-batch.
        rotary: rotary position embedding, if any.
        device: device of the tensors.
        dtype: compute dtype.
        drops: whether elements are dropped in this forward.
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
