"""Torch-free description of a decoder: dimensions, configuration, parameters and costs, tested against the real
module."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from pydantic import Field

from meshwright.models.contract.building_blocks import (
    attention_core,
    cross_entropy,
    embedding,
    masks_and_positions,
    product,
    residual_sum,
    rms_norm,
    rotary_embedding,
    shared_input,
    swiglu,
)
from meshwright.models.contract.model_facts import (
    AttentionFacts,
    EdgeFacts,
    HeadFacts,
    KindFacts,
    LinearInput,
    ModelFacts,
    Role,
    Saved,
    linear,
    vectors,
)
from meshwright.models.contract.operators import Operator, Rerun
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.settings.section import ModelSection, Section

BLOCK, WINDOW_BLOCK = "block", "window_block"
"""Names of the kinds of blocks: without and with a sliding window."""


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequency scaling for longer contexts (Grattafiori et al. 2024, section 3.4).

    Wavelengths above `original_seq_len / low_freq_factor` are multiplied by `factor`, those below
    `original_seq_len / high_freq_factor` are unchanged, and those in between are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192


@dataclass(frozen=True)
class DecoderSpec:
    """Dimensions of a decoder (Touvron et al. 2023; grouped-query attention of Ainslie et al. 2023)."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    window: int | None = None
    """Sliding window of attention in tokens; None if layers attend to all earlier tokens."""
    global_every: int = 0
    """With a window, every `global_every`-th layer attends to all earlier tokens; 0 if none does."""

    kind: ClassVar[str]
    """Name of the family."""

    def window_of(self, layer: int) -> int | None:
        return None if self.global_every and (layer + 1) % self.global_every == 0 else self.window

    def identity(self) -> dict[str, Any]:
        """Return all settings that determine the names, shapes and meaning of the parameters."""
        facts = {"kind": self.kind, **asdict(self)}
        if self.window is None:  # as in checkpoints from before there were windows
            del facts["window"], facts["global_every"]
        return facts


def describe(spec: DecoderSpec, seq_len: int) -> ModelFacts:
    """Describe a decoder trained on samples of `seq_len` tokens."""
    windows = _windows(spec)
    blocks = {name: _block(name, spec, window, seq_len) for name, window in windows.items()}
    layers = tuple(block_name(spec, layer) for layer in range(spec.num_layers))
    table = linear("embed", spec.dim, spec.vocab_size, role=Role.EMBEDDING)
    tied_to = table[0].name if spec.tie_embeddings else None
    head = linear("head", spec.dim, spec.vocab_size, role=Role.HEAD, tied_to=tied_to)
    norm = vectors(spec.dim, "norm.weight")
    ids = Saved(fixed_bytes=8.0)
    num_windows = sum(one is not None and one < seq_len for one in windows.values())
    lookup = (
        embedding("embed", spec.vocab_size, spec.dim),
        masks_and_positions("masks", len(blocks), windows=num_windows, rotary=True),
    )
    first = KindFacts("embed", "", table, saved=ids, unit=("embed",), operators=lookup)
    last = KindFacts(
        "head",
        "",
        (*norm, *head),
        saved=saved_by_norm(spec.dim),
        fused=saved_by_fused_norm(spec.dim),
        output=float(spec.vocab_size),
        head=HeadFacts("head"),
        output_divided=True,
        unit=("norm", "head"),
        operators=(
            rms_norm("norm", spec.dim),
            product("head", spec.dim, spec.vocab_size),
            cross_entropy(spec.vocab_size),
        ),
    )
    return ModelFacts(
        kinds=tuple(blocks.values()),
        layers=layers,
        edge=EdgeFacts("stream", (seq_len, spec.dim)),
        tokens=seq_len,
        identity=spec.identity(),
        has_dropout=True,
        first=(first,),
        last=(last,),
        # The backward costs twice the forward; the lookup is not counted (PaLM, appendix B).
        flops_per_token=3.0 * (sum(blocks[name].flops for name in layers) + last.flops),
    )


def saved_by_norm(dim: int) -> Saved:
    """Return what an RMS norm and the layer after it save: its input, root mean squares, normalized input and output,
    which a tensor-parallel layer gathers."""
    return Saved(full=dim, wide_stream=2.0 * dim + 1.0)


def saved_by_fused_norm(dim: int) -> Saved:
    """Return what an RMS norm that is one kernel saves, and the layer after it: its input, root mean squares, output.

    Compiled blocks save as much: what they compute again of an input is element by element.
    """
    return Saved(full=dim, stream=dim, wide_stream=1.0)


def attention_inputs(dim: int, queries: int) -> tuple[LinearInput, ...]:
    """Return the inputs of an attention layer's projections; its backward needs its own output anyway."""
    projections = ("attention.wq", "attention.wk", "attention.wv")
    return LinearInput(projections, dim, freed=Saved(full=dim)), LinearInput(("attention.wo",), queries, divided=True)


def block_name(spec: DecoderSpec, layer: int) -> str:
    return BLOCK if spec.window_of(layer) is None else WINDOW_BLOCK


def _windows(spec: DecoderSpec) -> dict[str, int | None]:
    """Return the sliding window of each kind of blocks, in order of first use."""
    return {block_name(spec, layer): spec.window_of(layer) for layer in range(spec.num_layers)}


def _block(name: str, spec: DecoderSpec, window: int | None, seq_len: int) -> KindFacts:
    dim, queries, keys = spec.dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parameters = (
        *vectors(dim, "attention_norm.weight"),
        *linear("attention.wq", dim, queries),
        *linear("attention.wk", dim, keys),
        *linear("attention.wv", dim, keys),
        *linear("attention.wo", queries, dim),
        *vectors(dim, "ffn_norm.weight"),
        *linear("ffn.gate", dim, spec.ffn_dim),
        *linear("ffn.up", dim, spec.ffn_dim),
        *linear("ffn.down", spec.ffn_dim, dim),
    )
    attention = AttentionFacts(
        "attention",
        MaskSpec(causal=True, window=window),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    # Rotated queries and keys, values, the attention's output and logsumexp; four feed-forward activations.
    others = Saved(divided=2.0 * queries + 2.0 * keys + 4.0 * spec.ffn_dim, wide_divided=spec.num_heads)
    fused = saved_by_fused_norm(dim) + saved_by_fused_norm(dim) + others
    return KindFacts(
        name,
        "blocks.{layer}",
        parameters,
        saved=saved_by_norm(dim) + saved_by_norm(dim) + others,
        fused=fused,
        # The activation function is computed again from its input.
        compiled=fused + Saved(divided=-spec.ffn_dim),
        linear_inputs=(
            *attention_inputs(dim, queries),
            LinearInput(("ffn.gate", "ffn.up"), dim, freed=Saved(full=dim)),
            LinearInput(("ffn.down",), spec.ffn_dim, divided=True, freed=Saved(divided=spec.ffn_dim)),
        ),
        operators=(
            *attention_operators(spec, attention.flops(seq_len)),
            rms_norm("ffn_norm", dim),
            *feed_forward("ffn", dim, spec.ffn_dim),
            residual_sum("ffn_add", dim, rerun=Rerun.NEVER),
        ),
        attention=attention,
    )


def attention_operators(spec: DecoderSpec, flops: float) -> tuple[Operator, ...]:
    """Return the operators of a block's first half, given the operations of attention per token."""
    dim, queries, keys = spec.dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (
        rms_norm("attention_norm", dim),
        shared_input("attention", dim, 3),
        product("attention.wq", dim, queries),
        product("attention.wk", dim, keys),
        product("attention.wv", dim, keys),
        rotary_embedding("attention", queries, keys),
        attention_core("attention", flops=flops, queries=queries, keys=keys, num_heads=spec.num_heads),
        product("attention.wo", queries, dim),
        residual_sum("attention_add", dim),
    )


def feed_forward(name: str, dim: int, hidden: int) -> tuple[Operator, ...]:
    """Return the operators of a SwiGLU feed-forward layer at the end of a block."""
    return (
        shared_input(name, dim, 2),
        product(f"{name}.gate", dim, hidden),
        product(f"{name}.up", dim, hidden),
        swiglu(name, hidden),
        product(f"{name}.down", hidden, dim, rerun=Rerun.NEVER),
    )


class RopeScalingConfig(Section):
    """RoPE frequency scaling for longer contexts."""

    factor: float = Field(8.0, gt=0, description="scale factor for the longest wavelengths")
    low_freq_factor: float = Field(1.0, gt=0, description="wavelengths above original_seq_len / this are scaled")
    high_freq_factor: float = Field(4.0, gt=0, description="wavelengths below original_seq_len / this are unchanged")
    original_seq_len: int = Field(8192, gt=0, description="context length before scaling, in tokens")


class DecoderConfig(ModelSection):
    """Dimensions of a decoder. A family adds its `kind`."""

    num_layers: int = Field(4, ge=1, description="transformer blocks")
    dim: int = Field(128, ge=1, description="width of the residual stream")
    num_heads: int = Field(4, ge=1, description="query heads")
    num_kv_heads: int = Field(4, ge=1, description="key/value heads (grouped-query attention when fewer)")
    head_dim: int | None = Field(None, ge=2, description="width of a head; dim / num_heads by default")
    ffn_dim: int = Field(352, ge=1, description="hidden width of the feed-forward layer")
    vocab_size: int = Field(256, ge=2, description="size of the vocabulary")
    tie_embeddings: bool = Field(False, description="share the embedding weight with the output head")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(None, description="RoPE frequency scaling for longer contexts")
    window: int | None = Field(
        None, ge=1, description="sliding window of attention in tokens; layers attend to all earlier tokens by default"
    )
    global_every: int = Field(
        0, ge=0, description="with model.window, every n-th layer attends to all earlier tokens; 0 if none does"
    )
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")

    def spec(self) -> DecoderSpec:
        """Return the model's dimensions with defaults filled in."""
        raise NotImplementedError

    def dimensions(self) -> dict[str, Any]:
        """Return the fields of `DecoderSpec`."""
        names = {field.name for field in fields(DecoderSpec)} - {"head_dim", "rope_scaling"}
        scaling = None if self.rope_scaling is None else RopeScaling(**self.rope_scaling.model_dump())
        head_dim = self.head_dim or self.dim // self.num_heads
        return {"head_dim": head_dim, "rope_scaling": scaling, **self.model_dump(include=names)}
