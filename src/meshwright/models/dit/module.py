"""The diffusion transformer (Peebles and Xie 2023, "Scalable diffusion models with transformers") as a plain module.

Blocks and the final layer have adaptive layer norm: each residual branch is multiplied by a gate. With modulation
initialised to zero all gates are closed and a block starts as the identity (adaLN-Zero).

Denoises images or videos, conditioned on the timestep, a class label (or the null class, for classifier-free guidance;
Ho and Salimans 2022) and, for videos, the frame rate. The condition is an argument of every block, so each pipeline
stage has a replica of the condition embedders and declares them shared.

Conditions and the positions of space-time patches, into which images and videos are split (Dosovitskiy et al. 2021),
have sinusoidal embeddings (Ho et al. 2020).

Shapes: b batch, c channels, f frames, y height, x width; t patches, frame by frame and row by row; e elements of a
patch; s sines and cosines, d model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.dit.description import FREQUENCY_DIM, DiTSpec
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.dropout_add.module import NO_DROPOUT, BlockDropout
from meshwright.nn.linear import Linear
from meshwright.nn.transformer_block import Attention, TokenContext, token_contexts

NORM_EPS = 1e-6


class DiT(nn.Module):
    """Patch embedding, condition embedders, blocks and final layer, or the part of them in one pipeline stage."""

    def __init__(self, spec: DiTSpec, part: Part | None = None, *, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self._drops = dropout > 0
        self.spec, self.part = spec, part or Part(range(spec.num_layers))
        patch = (spec.patch_frames, spec.patch_size, spec.patch_size)
        self._grid = PatchGrid(spec.sample_shape(), patch)
        if self.part.is_first:
            self.embed = Linear(spec.patch_dim(), spec.dim, bias=True)
        self.time_embed = MlpEmbedder(FREQUENCY_DIM, spec.dim)
        # The last row is the null class.
        self.label_embed = nn.Embedding(spec.num_classes + 1, spec.dim)
        if spec.is_video:
            self.fps_embed = MlpEmbedder(FREQUENCY_DIM, spec.dim)
        self.blocks = nn.ModuleDict(
            {
                str(layer): DiTBlock(
                    spec.dim,
                    num_heads=spec.num_heads,
                    head_dim=spec.head_dim,
                    ffn_dim=spec.ffn_dim,
                    dropout=BlockDropout(dropout, seed, layer),
                )
                for layer in self.part.layers
            }
        )
        if self.part.is_last:
            self.final = FinalLayer(spec.dim, patch_dim=spec.patch_dim())

    def forward(
        self, inputs: Tensor, timestep_b: Tensor, label_b: Tensor, fps_b: Tensor, layout: TokenLayout | None = None
    ) -> Tensor:
        """Predict the diffusion target [b, c, f, y, x] from noisy samples of the same shape.

        Parts other than the first take the residual stream [b, t, d] as input; parts other than the last return it. The
        label `num_classes` is the null class; frame rates are ignored for images, and the layout is needed for dropout
        only.
        """
        x_btd = self._embed_patches(inputs) if self.part.is_first else inputs
        cond_bd = self._condition(timestep_b, label_b, fps_b, like=x_btd)
        contexts = token_contexts(
            self.blocks.values(),
            layout or TokenLayout(self.spec.num_tokens()),
            device=x_btd.device,
            dtype=x_btd.dtype,
            drops=self._drops and self.training,
        )
        for block, tokens in zip(self.blocks.values(), contexts, strict=True):
            x_btd = block(x_btd, cond_bd, tokens)
        return self._grid.unpatchify(self.final(x_btd, cond_bd)) if self.part.is_last else x_btd

    def _embed_patches(self, x_bcfyx: Tensor) -> Tensor:
        x_btd: Tensor = self.embed(self._grid.patchify(x_bcfyx))
        return x_btd + position_table(self._grid.counts(), self.spec.dim, device=x_btd.device, dtype=x_btd.dtype)

    def _condition(self, timestep_b: Tensor, label_b: Tensor, fps_b: Tensor, *, like: Tensor) -> Tensor:
        """Return the sum of the condition embeddings [b, d], in the dtype of `like`."""
        cond_bd: Tensor = self.time_embed(sinusoids(timestep_b, FREQUENCY_DIM, dtype=like.dtype))
        cond_bd = cond_bd + self.label_embed(label_b)
        if self.spec.is_video:
            cond_bd = cond_bd + self.fps_embed(sinusoids(fps_b, FREQUENCY_DIM, dtype=like.dtype))
        return cond_bd.to(like.dtype)


class GeluFeedForward(nn.Module):
    """MLP fc2(gelu(fc1(x))), with the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, dim: int, *, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, ffn_dim, bias=True)
        self.fc2 = Linear(ffn_dim, dim, bias=True)

    def forward(self, x_btd: Tensor) -> Tensor:
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


MAX_PERIOD = 10000.0


def sinusoids(values: Tensor, num_features: int, *, dtype: torch.dtype) -> Tensor:
    """Compute cosines, then sines, of each value at decreasing frequencies; maps […] to […, s].

    Angles are computed in float64, because the error of a large float32 angle would exceed the result's rounding error.
    """
    half = num_features // 2
    steps = torch.arange(half, device=values.device, dtype=torch.float64)
    angles = values.to(torch.float64).unsqueeze(-1) * MAX_PERIOD ** (-steps / half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class MlpEmbedder(nn.Module):
    """Two-layer MLP fc2(silu(fc1(features))) over sinusoidal features."""

    def __init__(self, num_features: int, dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(num_features, dim, bias=True)
        self.fc2 = Linear(dim, dim, bias=True)

    def forward(self, features_bs: Tensor) -> Tensor:
        """Map [b, s] to [b, d]."""
        out: Tensor = self.fc2(F.silu(self.fc1(features_bs)))
        return out


@dataclass(frozen=True)
class PatchGrid:
    """Division of a sample into patches."""

    shape: tuple[int, int, int, int]
    """Sample shape: channels, frames, height, width."""
    patch: tuple[int, int, int]
    """Patch size: frames, height, width."""

    def counts(self) -> tuple[int, int, int]:
        """Return the number of patches along frames, height and width."""
        frames, height, width = (size // patch for size, patch in zip(self.shape[1:], self.patch, strict=True))
        return frames, height, width

    def patchify(self, x_bcfyx: Tensor) -> Tensor:
        """Split samples [b, c, f, y, x] into patches [b, t, e]."""
        sides = [side for pair in zip(self.counts(), self.patch, strict=True) for side in pair]
        x = x_bcfyx.reshape(-1, self.shape[0], *sides)
        return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def unpatchify(self, x_bte: Tensor) -> Tensor:
        """Reassemble patches into samples; the inverse of `patchify`."""
        x = x_bte.reshape(-1, *self.counts(), self.shape[0], *self.patch)
        return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(-1, *self.shape)


def position_table(counts: Sequence[int], dim: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Compute sinusoidal position embeddings of the patches [t, d].

    The features are divided equally among the axes with more than one patch; each axis's table is expanded along the
    others. The table is computed on the fly, like the rotary tables.
    """
    axes = [axis for axis, count in enumerate(counts) if count > 1] or [0]
    pairs = math.ceil(dim / 2)
    tables = []
    for index, axis in enumerate(axes):
        axis_pairs = pairs * (index + 1) // len(axes) - pairs * index // len(axes)
        positions = torch.arange(counts[axis], device=device)
        table = sinusoids(positions, 2 * axis_pairs, dtype=dtype)
        view = [1] * len(counts)
        view[axis] = counts[axis]
        tables.append(table.view(*view, 2 * axis_pairs).expand(*counts, 2 * axis_pairs))
    return torch.cat(tables, dim=-1).flatten(0, -2)[:, :dim]
