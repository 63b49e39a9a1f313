"""Torch-free description of a diffusion transformer: configuration, parameters and costs (Peebles and Xie 2023,
"Scalable diffusion models with transformers"). Tested against the real module."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field

from meshwright.models.contract.building_blocks import masks_and_positions
from meshwright.models.contract.model_facts import (
    AttentionFacts,
    EdgeFacts,
    KindFacts,
    LinearInput,
    ModelFacts,
    Role,
    Saved,
    linear,
)
from meshwright.models.dit.operators import (
    block_operators,
    embedder_operators,
    final_operators,
    label_operators,
    patch_operators,
)
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.settings.section import ModelSection, Section

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
    mlp = {
        name: (*linear(f"{name}.fc1", FREQUENCY_DIM, dim, bias=True), *linear(f"{name}.fc2", dim, dim, bias=True))
        for name in mlps
    }
    labels = linear("label_embed", dim, spec.num_classes + 1, role=Role.EMBEDDING)
    embedders = KindFacts(
        "embedders",
        "",
        (*mlp["time_embed"], *labels, *mlp.get("fps_embed", ())),
        # Frequencies, and the hidden layer before and after its activation; the condition.
        saved=Saved(full=(len(mlps) * (FREQUENCY_DIM + 2.0 * dim) + dim) / tokens, fixed_bytes=8.0 / tokens),
        operators=(
            *(one for name in mlps for one in embedder_operators(name, FREQUENCY_DIM, dim, tokens)),
            *label_operators(spec.num_classes + 1, dim, tokens, sums=len(mlps)),
            masks_and_positions("masks", 1, rotary=False),
        ),
    )
    patches = KindFacts(
        "patches",
        "",
        linear("embed", spec.patch_dim(), dim, bias=True),
        saved=Saved(full=spec.patch_dim()),
        operators=patch_operators(dim, spec.patch_dim(), num_axes=3 if spec.is_video else 2),
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
        operators=final_operators(dim, spec.patch_dim(), tokens),
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
    attention = AttentionFacts(
        "attention", MaskSpec(), num_heads=spec.num_heads, num_kv_heads=spec.num_heads, head_dim=spec.head_dim
    )
    others = Saved(divided=4.0 * inner + 2.0 * ffn, wide_divided=spec.num_heads)
    return KindFacts(
        "block",
        "blocks.{layer}",
        parameters,
        # Per half: the input, the norm's output with mean and deviation, its modulation, and the gate's operand; then
        # queries, keys, values, the attention's output and logsumexp; and the feed-forward's hidden activations before
        # and after GELU. Per sample: the condition, the modulation, and 1 + its two scales.
        saved=Saved(full=8.0 * dim + 4.0 + 9.0 * dim / tokens) + others,
        # Norms' outputs, the input of the second half and the scales are computed again.
        compiled=Saved(full=5.0 * dim + 4.0 + 8.0 * dim / tokens) + others,
        # Modulation multiplies one row per sample, too few for float8.
        linear_inputs=(
            LinearInput(("attention.wq", "attention.wk", "attention.wv"), dim, freed=Saved(full=dim)),
            LinearInput(("attention.wo",), inner, divided=True),
            LinearInput(("mlp.fc1",), dim, freed=Saved(full=dim)),
            LinearInput(("mlp.fc2",), ffn, divided=True, freed=Saved(divided=ffn)),
        ),
        operators=block_operators(
            dim, inner, ffn, num_heads=spec.num_heads, tokens=tokens, flops=attention.flops(tokens)
        ),
        attention=attention,
    )


def init_std(fan_in: int, fan_out: int) -> float:
    """Return the standard deviation of Xavier initialisation (Glorot and Bengio 2010), used for DiT's linear layers."""
    return math.sqrt(2.0 / (fan_in + fan_out))


class DiTConfig(ModelSection):
    """The dimensions of a diffusion transformer."""

    kind: Literal["dit"] = Field("dit", description="family")
    num_layers: int = Field(4, ge=1, description="transformer blocks")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    num_heads: int = Field(4, ge=1, description="attention heads")
    head_dim: int | None = Field(None, ge=1, description="width of a head; dim / num_heads by default")
    ffn_dim: int = Field(512, ge=1, description="hidden width of the feed-forward layer")
    image_size: int = Field(8, ge=1, description="height and width of an image, in pixels")
    patch_size: int = Field(2, ge=1, description="height and width of a patch, in pixels; each patch is a token")
    num_channels: int = Field(1, ge=1, description="channels per pixel: 1 grey, 3 RGB")
    num_frames: int = Field(1, ge=1, description="frames per sample; more than 1 for videos")
    patch_frames: int = Field(1, ge=1, description="frames per patch")
    num_classes: int = Field(10, ge=1, description="number of classes")
    zero_init: bool = Field(
        True, description="gates and output start at zero (adaLN-Zero); prove uses false, for gradients at step 1"
    )

    def spec(self) -> DiTSpec:
        dimensions = self.model_dump(exclude={"kind", "head_dim"})
        return DiTSpec(head_dim=self.head_dim or self.dim // self.num_heads, **dimensions)


class DiffusionConfig(Section):
    """Training and sampling of a diffusion transformer."""

    num_timesteps: int = Field(1000, ge=2, description="diffusion timesteps from data to noise")
    schedule: Literal["cosine", "linear"] = Field("cosine", description="noise schedule")
    prediction: Literal["noise", "velocity"] = Field("noise", description="prediction target of the model")
    label_dropout: float = Field(0.1, ge=0, lt=1, description="fraction of training samples whose class is dropped")
    guidance: float = Field(2.0, ge=0, description="classifier-free guidance scale in sampling; 1 disables guidance")
    sampling_steps: int = Field(50, ge=1, description="DDIM sampling steps")
    num_samples: int = Field(100, ge=0, description="samples drawn at each validation, ordered by class; 0 for none")
