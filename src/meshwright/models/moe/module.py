"""A mixture-of-experts language model as a plain module: a decoder with experts instead of feed-forward layers.

Shapes: b batch, t time, d model width, h head_dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.decoder.module import Decoder, make_block
from meshwright.models.moe.description import MoeSpec
from meshwright.nn.attention.causal import CausalAttention
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router_config import RouterConfig


class MoeTransformer(Decoder):
    """Token embedding, dense blocks, blocks with experts, final norm and output head, or the part of one stage."""

    def __init__(self, spec: MoeSpec, router: RouterConfig, part: Part | None = None) -> None:
        super().__init__(
            spec, part, lambda layer: make_block(spec) if layer < spec.num_dense_layers else MoeBlock(spec, router)
        )


class MoeBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, spec: MoeSpec, router: RouterConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.attention = CausalAttention(
            spec.dim, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        self.ffn_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.moe = MixtureOfExperts(spec.dim, router, expert_dim=spec.expert_dim, shared_dim=spec.shared_dim)

    def forward(self, x_btd: Tensor, cos_th: Tensor, sin_th: Tensor) -> Tensor:
        """Map [b, t, d] to [b, t, d]; the rotary tables are [t, h/2]."""
        x_btd = x_btd + self.attention(self.attention_norm(x_btd), cos_th, sin_th)
        out: Tensor = x_btd + self.moe(self.ffn_norm(x_btd))
        return out
