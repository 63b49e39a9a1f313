"""What a diffusion transformer is, as a value (Peebles and Xie 2023, "Scalable diffusion models with transformers").

Torch-free, and tested against the real module, as `spec` is.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.models.shapes import ParameterShape, in_blocks
from meshwright.pipeline.shared import SharedParameter

FREQUENCY_DIM = 256
"""Sines and cosines that a timestep or a frame rate is given as (Peebles and Xie's code)."""


@dataclass(frozen=True)
class DiTSpec:
    """Dimensions of a diffusion transformer for images, or for videos where `num_frames` is over 1."""

    num_layers: int
    dim: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    image_size: int
    patch_size: int
    num_channels: int
    num_classes: int
    num_frames: int = 1
    patch_frames: int = 1
    zero_init: bool = True
    """Gates and the output start at zero, so that every block starts as the identity (adaLN-Zero)."""

    @property
    def is_video(self) -> bool:
        """Whether samples have frames, and a frame rate that the model is told."""
        return self.num_frames > 1

    def sample_shape(self) -> tuple[int, int, int, int]:
        """Of a sample: channels, frames, height, width."""
        return (self.num_channels, self.num_frames, self.image_size, self.image_size)

    def num_tokens(self) -> int:
        """Space-time patches of a sample."""
        return self.num_frames // self.patch_frames * (self.image_size // self.patch_size) ** 2

    def patch_dim(self) -> int:
        """Numbers in a patch."""
        return self.num_channels * self.patch_frames * self.patch_size**2

    def shared_names(self) -> tuple[str, ...]:
        """The embedders' parameters, which every stage has a copy of."""
        embedders = ["time_embed", *(["fps_embed"] if self.is_video else [])]
        mlps = [f"{mlp}.{layer}.{kind}" for mlp in embedders for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
        return tuple(sorted([*mlps, "label_embed.weight"]))

    def shared_parameters(self, num_stages: int) -> tuple[SharedParameter, ...]:
        """What the model's parts share, in a pipeline of so many stages."""
        if num_stages == 1:
            return ()
        return tuple(SharedParameter(n, tuple((s, n) for s in range(num_stages))) for n in self.shared_names())

    def part_parameters(self, layers: range, *, is_first: bool, is_last: bool) -> list[ParameterShape]:
        """Parameters of the part of the model that has these layers, in the module's order."""
        dim, inner, ffn = self.dim, self.num_heads * self.head_dim, self.ffn_dim
        block = [
            *_linear("modulation", dim, 6 * dim),
            *_linear("attention.wq", dim, inner, tp_dim=0),
            *_linear("attention.wk", dim, inner, tp_dim=0)[:1],  # a key's bias cancels in the softmax
            *_linear("attention.wv", dim, inner, tp_dim=0),
            *_linear("attention.wo", inner, dim, tp_dim=1),
            *_linear("mlp.fc1", dim, ffn, tp_dim=0),
            *_linear("mlp.fc2", ffn, dim, tp_dim=1),
        ]
        mlps = ["time_embed", *(["fps_embed"] if self.is_video else [])]
        embedders = {
            mlp: [*_linear(f"{mlp}.fc1", FREQUENCY_DIM, dim), *_linear(f"{mlp}.fc2", dim, dim)] for mlp in mlps
        }
        return [
            *(_linear("embed", self.patch_dim(), dim) if is_first else ()),
            *embedders["time_embed"],
            ParameterShape("label_embed.weight", (self.num_classes + 1, dim)),
            *embedders.get("fps_embed", ()),
            *in_blocks(block, layers),
            *(_linear("final.modulation", dim, 2 * dim) if is_last else ()),
            *(_linear("final.head", dim, self.patch_dim()) if is_last else ()),
        ]

    def parameter_names(self) -> list[str]:
        """Every parameter of the model."""
        return [p.name for p in self.part_parameters(range(self.num_layers), is_first=True, is_last=True)]

    def params_per_layer(self) -> int:
        """Parameters of one block: attention, feed-forward and modulation, with biases except of the keys."""
        inner = self.num_heads * self.head_dim
        attention = 3 * inner * self.dim + 2 * inner + self.dim * (inner + 1)
        feed_forward = self.ffn_dim * (self.dim + 1) + self.dim * (self.ffn_dim + 1)
        return attention + feed_forward + 6 * self.dim * (self.dim + 1)

    def embedder_params(self) -> int:
        """Parameters of the embedders that every stage has."""
        mlp = self.dim * (FREQUENCY_DIM + 1) + self.dim * (self.dim + 1)
        return mlp * (2 if self.is_video else 1) + (self.num_classes + 1) * self.dim

    def first_params(self) -> int:
        """Parameters of the patch embedding."""
        return self.dim * (self.patch_dim() + 1)

    def last_params(self) -> int:
        """Parameters of the final layer: its modulation and the projection to a patch."""
        return 2 * self.dim * (self.dim + 1) + self.patch_dim() * (self.dim + 1)

    def num_params(self) -> int:
        """Parameters of the whole model; a shared one counts once."""
        ends = self.first_params() + self.last_params()
        return ends + self.embedder_params() + self.num_layers * self.params_per_layer()

    def layer_flops(self, seq_len: int) -> float:
        """Forward floating-point operations of one block for one token of `seq_len`.

        Modulation is computed once a sample, so a token has its share of it.
        """
        inner = self.num_heads * self.head_dim
        matmuls = 2.0 * (4 * self.dim * inner + 2 * self.dim * self.ffn_dim)
        return matmuls + 4.0 * inner * seq_len + 12.0 * self.dim**2 / seq_len

    def head_flops(self) -> float:
        """Forward floating-point operations of the final layer for one token."""
        return 2.0 * self.dim * self.patch_dim() + 4.0 * self.dim**2 / self.num_tokens()

    def embedding_flops(self) -> float:
        """Forward floating-point operations of the patch embedding for one token."""
        return 2.0 * self.dim * self.patch_dim()

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward for one token; the embedders', once a sample, included."""
        embedders = (2 if self.is_video else 1) * 2.0 * self.dim * (FREQUENCY_DIM + self.dim) / seq_len
        forward = self.num_layers * self.layer_flops(seq_len) + self.head_flops() + self.embedding_flops() + embedders
        return 3.0 * forward

    def identity(self) -> dict[str, Any]:
        """Everything that decides names and shapes of the parameters and what they mean: a checkpoint's identity."""
        facts = asdict(self)
        del facts["zero_init"]  # decides initial values only
        return {"kind": "dit", **facts}


def _linear(name: str, fan_in: int, fan_out: int, *, tp_dim: int | None = None) -> list[ParameterShape]:
    """A linear layer's weight and bias; a bias is divided where the layer's outputs are."""
    weight = ParameterShape(f"{name}.weight", (fan_out, fan_in), tp_dim)
    return [weight, ParameterShape(f"{name}.bias", (fan_out,), 0 if tp_dim == 0 else None)]


def init_std(fan_in: int, fan_out: int) -> float:
    """Standard deviation of Xavier's initialisation (Glorot and Bengio 2010), which DiT's linear layers start with."""
    return math.sqrt(2.0 / (fan_in + fan_out))
