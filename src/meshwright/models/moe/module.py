"""A mixture-of-experts language model as a plain module: a decoder with experts instead of feed-forward layers.

Shapes: b batch, t time, d model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.decoder.module import Decoder, make_attention, make_block
from meshwright.models.moe.description import MoeSpec
from meshwright.nn.dropout_add.module import NO_DROPOUT, BlockDropout
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.nn.transformer_block import TokenContext


class MoeTransformer(Decoder):
    """Token embedding, dense blocks, blocks with experts, final norm and output head, or the part of one stage."""

    def __init__(
        self, spec: MoeSpec, router: RouterConfig, part: Part | None = None, *, dropout: float = 0.0, seed: int = 0
    ) -> None:
        def block(spec: MoeSpec, layer: int, dropout: BlockDropout) -> nn.Module:
            is_dense = layer < spec.num_dense_layers
            return make_block(spec, layer, dropout) if is_dense else MoeBlock(spec, router, layer, dropout)

        super().__init__(spec, part, dropout=dropout, seed=seed, block=block)


class MoeBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, spec: MoeSpec, router: RouterConfig, layer: int, dropout: BlockDropout = NO_DROPOUT) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.attention = make_attention(spec, layer)
        self.attention_add, self.moe_add = dropout.adds()
        self.ffn_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.moe = MixtureOfExperts(spec.dim, router, expert_dim=spec.expert_dim, shared_dim=spec.shared_dim)

    def forward(self, x_btd: Tensor, tokens: TokenContext) -> Tensor:
        x_btd = self.attention_add(self.attention(self.attention_norm(x_btd), tokens), x_btd, tokens.rows_bt)
        out: Tensor = self.moe_add(self.moe(self.ffn_norm(x_btd)), x_btd, tokens.rows_bt)
        return out
