"""Diffusion transformer block and final layer with adaptive layer norm (adaLN; Peebles and Xie 2023).

Each residual branch is multiplied by a gate. With modulation initialised to zero all gates are closed and the block
starts as the identity (adaLN-Zero); initial values are set elsewhere.

Shapes: b batch, t patches, d model width, e elements of a patch.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.attention.module import Attention, TokenContext
from meshwright.nn.dropout_add.block_dropout import NO_DROPOUT, BlockDropout
from meshwright.nn.linear import Linear

NORM_EPS = 1e-6


class GeluFeedForward(nn.Module):
    """MLP fc2(gelu(fc1(x))), with the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, dim: int, *, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, ffn_dim, bias=True)
        self.fc2 = Linear(ffn_dim, dim, bias=True)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x_btd), approximate="tanh"))
        return out


class DiTBlock(nn.Module):
    """Modulated block: x + gate · attention(modulate(x)), then x + gate · mlp(modulate(x))."""

    def __init__(
        self, dim: int, *, num_heads: int, head_dim: int, ffn_dim: int, dropout: BlockDropout = NO_DROPOUT
    ) -> None:
        super().__init__()
        self.modulation = Linear(dim, 6 * dim, bias=True)
        self.attention = Attention(
            dim, num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, mask=MaskSpec(), bias=True
        )
        self.mlp = GeluFeedForward(dim, ffn_dim=ffn_dim)
        self.attention_add, self.mlp_add = dropout.adds()

    def forward(self, x_btd: Tensor, cond_bd: Tensor, tokens: TokenContext) -> Tensor:
        """Map [b, t, d] and the condition [b, d] to [b, t, d]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = _modulation(self.modulation, cond_bd, 6)
        x_btd = self.attention_add(
            gate_a * self.attention(_modulate(x_btd, shift_a, scale_a), tokens), x_btd, tokens.rows_bt
        )
        out: Tensor = self.mlp_add(gate_m * self.mlp(_modulate(x_btd, shift_m, scale_m)), x_btd, tokens.rows_bt)
        return out


class FinalLayer(nn.Module):
    """Modulation and projection of the residual stream to patches."""

    def __init__(self, dim: int, *, patch_dim: int) -> None:
        super().__init__()
        self.modulation = Linear(dim, 2 * dim, bias=True)
        self.head = Linear(dim, patch_dim, bias=True)

    def forward(self, x_btd: Tensor, cond_bd: Tensor) -> Tensor:
        """Map [b, t, d] and the condition [b, d] to patches [b, t, e]."""
        shift, scale = _modulation(self.modulation, cond_bd, 2)
        out: Tensor = self.head(_modulate(x_btd, shift, scale))
        return out


def _modulation(layer: Linear, cond_bd: Tensor, num_parts: int) -> tuple[Tensor, ...]:
    """Compute the modulation vectors, each [b, 1, d], broadcast over patches."""
    out: Tensor = layer(F.silu(cond_bd))
    return out.unsqueeze(1).chunk(num_parts, dim=-1)


def _modulate(x_btd: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x_btd, x_btd.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift
