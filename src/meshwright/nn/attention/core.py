"""The part of an attention layer between its projections, which context parallelism replaces.

Shapes: b batch, s tokens on this rank, n heads, h head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshwright.nn.attention.attention import attention
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.token_layout import TokenLayout


@runtime_checkable
class AttentionCore(Protocol):
    """Scaled dot-product attention over the tokens of a micro-batch."""

    backend: str
    """Name of a backend, see `attention`."""

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> Any:
        """Return the mask of a micro-batch in the form that this core takes; made once for all layers of a stage.

        Args:
            mask: rules and documents.
            layout: tokens of the micro-batch.
            device: device of the tensors.
            request: dtype and heads of the calls, by which a backend is chosen; float32 by default.
        """

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: Any) -> Tensor:
        """Return the output [b, s, n, h]; keys and values may have fewer heads."""


@dataclass(frozen=True)
class LocalAttention(AttentionCore):
    """Attention over tokens that are all on this rank."""

    backend: str = "auto"

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> AttentionMask:
        """Return the prepared mask. Tokens of a shard attend to that shard alone."""
        if layout.shards is not None:
            own = layout.shard
            return AttentionMask.at(
                mask, layout.seq_len, own, own, device=device, backend=self.backend, request=request
            )
        return AttentionMask(mask, layout.seq_len, device=device, backend=self.backend, request=request)

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: AttentionMask) -> Tensor:
        """Return the output [b, s, n, h]."""
        return attention(q_bsnh, k_bsnh, v_bsnh, mask=mask, backend=self.backend)
