"""A mixture-of-experts language model as a plain module: a decoder with experts instead of feed-forward layers.

Shapes: b batch, t time, d model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.decoder.module import Decoder, make_attention, make_block
from meshwright.models.moe.description import MoeSpec
from meshwright.nn.attention.module import TokenContext
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router_config import RouterConfig


class MoeTransformer(Decoder):
    """Token embedding, dense blocks, blocks with experts, final norm and output head, or the part of one stage."""

    def __init__(self, spec: MoeSpec, router: RouterConfig, part: Part | None = None) -> None:
        super().__init__(
            spec,
            part,
            lambda layer: make_block(spec, layer) if layer < spec.num_dense_layers else MoeBlock(spec, router, layer),
        )


class MoeBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, spec: MoeSpec, router: RouterConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.attention = make_attention(spec, layer)
        self.ffn_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.moe = MixtureOfExperts(spec.dim, router, expert_dim=spec.expert_dim, shared_dim=spec.shared_dim)

    def forward(self, x_btd: Tensor, tokens: TokenContext) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        x_btd = x_btd + self.attention(self.attention_norm(x_btd), tokens)
        out: Tensor = x_btd + self.moe(self.ffn_norm(x_btd))
        return out
