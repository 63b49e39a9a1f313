"""Torch-free description of a diffusion transformer: dimensions, parameters and costs (Peebles and Xie 2023, "Scalable
diffusion models with transformers"). Tested against the real module.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.models.contract.model_facts import (
    AttentionFacts,
    EdgeFacts,
    KindFacts,
    LinearInput,
    ModelFacts,
    ParameterFacts,
    Role,
    Saved,
    linear,
)
from meshwright.nn.attention.mask_spec import MaskSpec

FREQUENCY_DIM = 256
"""Number of sinusoidal features of a timestep or frame rate (as in Peebles and Xie's code)."""


@dataclass(frozen=True)
class DiTSpec:
    """Dimensions of a diffusion transformer for images, or for videos if `num_frames` is more than 1."""

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
    """Initialise gates and output to zero, so that every block starts as the identity (adaLN-Zero)."""

    @property
    def is_video(self) -> bool:
        """True if samples are videos, with a frame rate as an additional condition."""
        return self.num_frames > 1

    def sample_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of a sample: channels, frames, height, width."""
        return (self.num_channels, self.num_frames, self.image_size, self.image_size)

    def num_tokens(self) -> int:
        """Return the number of space-time patches of a sample."""
        return self.num_frames // self.patch_frames * (self.image_size // self.patch_size) ** 2

    def patch_dim(self) -> int:
        """Return the number of elements of a patch."""
        return self.num_channels * self.patch_frames * self.patch_size**2

    def identity(self) -> dict[str, Any]:
        """Return all settings that determine the names, shapes and meaning of the parameters."""
        facts = asdict(self)
        del facts["zero_init"]  # affects initial values only
        return {"kind": "dit", **facts}


UNUSED_KEYS = {
    "data.tokenizer": "text",
    "data.token_dtype": "text",
    "data.packing": "text",
    "data.separator": "text",
    "data.bos": "text",
    "data.text_field": "text",
    "data.chat_field": "text",
    "data.mixture": "text",
    "data.validation_source": "text",
    "data.when_exhausted": "text",
    "train.seq_len": "text",
    "train.sample_tokens": "text",
    "train.sample_prompt": "text",
}
"""Configuration keys that have no effect on image models, and the kind of data they apply to."""


def describe(spec: DiTSpec) -> ModelFacts:
    """Describe a diffusion transformer. Per-sample costs (modulation, embedders) are divided by the sample's tokens."""
    dim, tokens = spec.dim, spec.num_tokens()
    block = _block(spec)
    mlps = ("time_embed", *(["fps_embed"] if spec.is_video else []))
    mlp = {name: _mlp(name, dim) for name in mlps}
    labels = linear("label_embed", dim, spec.num_classes + 1, role=Role.EMBEDDING)
    embedders = KindFacts(
        "embedders",
        "",
        (*mlp["time_embed"], *labels, *mlp.get("fps_embed", ())),
        # Frequencies, and the hidden layer before and after its activation; the condition.
        saved=Saved(full=(len(mlps) * (FREQUENCY_DIM + 2.0 * dim) + dim) / tokens, fixed_bytes=8.0 / tokens),
        flops=len(mlps) * 2.0 * dim * (FREQUENCY_DIM + dim) / tokens,
    )
    patches = KindFacts(
        "patches",
        "",
        linear("embed", spec.patch_dim(), dim, bias=True),
        saved=Saved(full=spec.patch_dim()),
        flops=2.0 * dim * spec.patch_dim(),
    )
    final = KindFacts(
        "final",
        "",
        (
            *linear("final.modulation", dim, 2 * dim, bias=True),
            *linear("final.head", dim, spec.patch_dim(), bias=True, role=Role.HEAD),
        ),
        # The input, the norm's output with mean and deviation, its modulation; per sample the condition, the
        # modulation, and 1 + the scale.
        saved=Saved(full=3.0 * dim + 2.0 + 4.0 * dim / tokens),
        output=float(spec.patch_dim()),
        flops=2.0 * dim * spec.patch_dim() + 4.0 * dim**2 / tokens,
    )
    forward = spec.num_layers * block.flops + final.flops + patches.flops + embedders.flops
    return ModelFacts(
        kinds=(block,),
        layers=(block.name,) * spec.num_layers,
        edge=EdgeFacts("stream", (tokens, dim), sequence_dim=None),
        tokens=tokens,
        identity=spec.identity(),
        has_dropout=True,
        first=(patches,),
        every=(embedders,),
        last=(final,),
        flops_per_token=3.0 * forward,
        unread=UNUSED_KEYS,
    )


def _block(spec: DiTSpec) -> KindFacts:
    dim, inner, ffn = spec.dim, spec.num_heads * spec.head_dim, spec.ffn_dim
    parameters = (
        *linear("modulation", dim, 6 * dim, bias=True),
        *linear("attention.wq", dim, inner, bias=True),
        *linear("attention.wk", dim, inner),  # a key's bias cancels in the softmax
        *linear("attention.wv", dim, inner, bias=True),
        *linear("attention.wo", inner, dim, bias=True),
        *linear("mlp.fc1", dim, ffn, bias=True),
        *linear("mlp.fc2", ffn, dim, bias=True),
    )
    tokens = spec.num_tokens()
    matmuls = 2.0 * (4 * dim * inner + 2 * dim * ffn)
    attention = AttentionFacts(
        "attention", MaskSpec(), num_heads=spec.num_heads, num_kv_heads=spec.num_heads, head_dim=spec.head_dim
    )
    return KindFacts(
        "block",
        "blocks.{layer}",
        parameters,
        # Per half: the input, the norm's output with mean and deviation, its modulation, and the gate's operand; then
        # queries, keys, values, the attention's output and logsumexp; and the feed-forward's hidden activations before
        # and after GELU. Per sample: the condition, the modulation, and 1 + its two scales.
        saved=Saved(
            full=8.0 * dim + 4.0 + 9.0 * dim / tokens, divided=4.0 * inner + 2.0 * ffn, wide_divided=spec.num_heads
        ),
        kept=Saved(full=2.0 * dim + 6.0 * dim / tokens, divided=4.0 * inner + float(ffn), wide_divided=spec.num_heads),
        # Modulation multiplies one row per sample, too few for float8.
        linear_inputs=(
            LinearInput(("attention.wq", "attention.wk", "attention.wv"), dim, freed=Saved(full=dim)),
            LinearInput(("attention.wo",), inner, divided=True),
            LinearInput(("mlp.fc1",), dim, freed=Saved(full=dim)),
            LinearInput(("mlp.fc2",), ffn, divided=True, freed=Saved(divided=ffn)),
        ),
        flops=matmuls + attention.flops(tokens) + 12.0 * dim**2 / tokens,
        attention=attention,
    )


def _mlp(name: str, dim: int) -> tuple[ParameterFacts, ...]:
    return (*linear(f"{name}.fc1", FREQUENCY_DIM, dim, bias=True), *linear(f"{name}.fc2", dim, dim, bias=True))


def init_std(fan_in: int, fan_out: int) -> float:
    """Return the standard deviation of Xavier initialisation (Glorot and Bengio 2010), used for DiT's linear layers."""
    return math.sqrt(2.0 / (fan_in + fan_out))
