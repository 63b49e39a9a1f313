"""A GPT family for plans only (Radford et al. 2019; Shoeybi et al. 2019): biases, LayerNorm, learned positions, a feed-
forward layer of 4 · dim columns without a gate, and a head tied to the embedding.

Attention is either one kernel, or the scores are kept, with a softmax and dropout between two products, as before
FlashAttention (Dao et al. 2022). Kernels are those of Megatron-LM and llm-foundry, which fuse biases, dropout and sums.
Doesn't import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import Field

from meshwright.errors import ConfigError
from meshwright.models.contract.building_blocks import (
    DIVIDED,
    STREAM,
    Sharding,
    attention_core,
    cross_entropy,
    embedding,
    product,
)
from meshwright.models.contract.family import Family, RunFacts
from meshwright.models.contract.model_facts import (
    AttentionFacts,
    EdgeFacts,
    HeadFacts,
    KindFacts,
    ModelFacts,
    Role,
    Saved,
    linear,
    vectors,
)
from meshwright.models.contract.operators import Kernels, Operator, OperatorKind, Rerun
from meshwright.models.contract.tp_styles import COLUMN, FINAL_ROW, HEAD, ROW, VOCABULARY, Style, gather
from meshwright.models.contract.tp_styles import STREAM as STREAM_STYLE
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.settings.section import ModelSection

STYLES: Mapping[str, Mapping[str, Style]] = {
    "block": {
        "norm1": STREAM_STYLE, "attention": gather(), "attention.qkv": COLUMN, "attention.out": ROW,
        "norm2": STREAM_STYLE, "ffn": gather(), "ffn.up": COLUMN, "ffn.down": FINAL_ROW,
    },
    "embed": {"embed": VOCABULARY},
    "head": {"norm": STREAM_STYLE, "head": HEAD},
}  # fmt: skip


class GptConfig(ModelSection):
    """Dimensions of a GPT."""

    num_layers: int = Field(2, ge=1, description="blocks")
    dim: int = Field(64, ge=1, description="width of the stream")
    num_heads: int = Field(4, ge=1, description="attention heads")
    ffn_dim: int = Field(256, ge=1, description="columns of the feed-forward layer")
    vocab_size: int = Field(256, ge=2, description="size of the vocabulary")
    scores: bool = Field(False, description="keep attention's scores, with dropout, instead of one kernel")
    bias: bool = Field(True, description="biases of linear layers and norms, and dropout of branches")


class GptFamily(Family):
    """GPT, described but not built."""

    sections = {"model": GptConfig}

    def describe(self, f: RunFacts) -> ModelFacts:
        c, tokens = f.section(GptConfig), f.seq_len
        table = linear("embed", c.dim, c.vocab_size, role=Role.EMBEDDING)
        positions = linear("positions", c.dim, tokens)
        first = KindFacts(
            "embed", "", (*table, *positions), saved=Saved(stream=_mask(c), fixed_bytes=8.0),
            operators=(embedding("embed", c.vocab_size, c.dim), _elementwise("positions", c.dim, 3, 1, STREAM)),
        )  # fmt: skip
        last = KindFacts(
            "head", "", (*_norm_weights(c, "norm"), *linear("head", c.dim, c.vocab_size, tied_to="embed.weight")),
            saved=Saved(full=c.dim, stream=c.dim), output=float(c.vocab_size), head=HeadFacts("head"),
            output_divided=True,
            operators=(_norm("norm", c.dim), product("head", c.dim, c.vocab_size), _loss(c)),
        )  # fmt: skip
        return ModelFacts(
            kinds=(_block(c, tokens),),
            layers=("block",) * c.num_layers,
            edge=EdgeFacts("stream", (tokens, c.dim)),
            tokens=tokens,
            identity=c.model_dump(),
            first=(first,),
            last=(last,),
            flops_per_token=3.0 * (c.num_layers * _block(c, tokens).flops + last.flops),
        )

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        return STYLES

    def _plan_only(self, *_: Any) -> NoReturn:
        raise ConfigError("this GPT can't be built", rule="it describes published runs", fix="meshwright plan")

    build: Any = _plan_only
    initial: Any = _plan_only
    open_data: Any = _plan_only
    task: Any = _plan_only
    reference: Any = _plan_only


def _mask(c: GptConfig) -> float:
    """Return the elements that the mask of a dropout of the stream takes: half of one, as it has a byte for each."""
    return 0.5 * c.dim if c.bias else 0.0


def _block(c: GptConfig, tokens: int) -> KindFacts:
    dim, wide = c.dim, c.ffn_dim
    parameters = (
        *_norm_weights(c, "norm1"), *linear("attention.qkv", dim, 3 * dim, bias=c.bias),
        *linear("attention.out", dim, dim, bias=c.bias), *_norm_weights(c, "norm2"),
        *linear("ffn.up", dim, wide, bias=c.bias), *linear("ffn.down", wide, dim, bias=c.bias),
    )  # fmt: skip
    attention = AttentionFacts("attention", MaskSpec(causal=True), c.num_heads, c.num_heads, dim // c.num_heads)
    scores = float(c.num_heads * tokens)
    # Inputs of norms and layers, queries, keys, values, attention's result, the activation's input and result; masks of
    # dropout take a byte per element.
    masks = 2 * _mask(c)
    plain = Saved(full=2.0 * dim, stream=2.0 * dim + masks, divided=4.0 * dim + 2.0 * wide)
    core = Saved(divided=2.5 * scores) if c.scores else Saved(wide_divided=c.num_heads)
    kernels = _scores(c, scores) if c.scores else _flash(c, attention.flops(tokens))
    return KindFacts(
        "block",
        "blocks.{layer}",
        parameters,
        saved=plain + core,
        # Selective recomputation is that of the scores only (Korthikanti et al. 2022, section 5). Inputs of layers that
        # tp shards are gathered again, so what gathers return isn't kept; what reductions return counts beside this.
        kept=Saved(full=-2.0 * dim, stream=dim + masks, divided=4.0 * dim + 2.0 * wide),
        operators=(
            _norm("norm1", dim),
            product("attention.qkv", dim, 3 * dim, bias=DIVIDED if c.bias else None),
            _elementwise("attention.qkv", 6.0 * dim if c.scores else 0.0, 1, 1, DIVIDED),
            *kernels,
            product("attention.out", dim, dim, bias=STREAM if c.bias else None),
            _elementwise("attention.add", dim, 3.5 if c.bias else 3, 5.5 if c.bias else 3, STREAM),
            _norm("norm2", dim),
            product("ffn.up", dim, wide, bias=DIVIDED if c.bias else None),
            _elementwise("ffn", wide, 2, 3, DIVIDED),
            product("ffn.down", wide, dim, bias=STREAM if c.bias else None, rerun=Rerun.NEVER),
            _elementwise("ffn.add", dim, 3.5 if c.bias else 3, 5.5 if c.bias else 3, STREAM, rerun=Rerun.NEVER),
        ),
        attention=attention,
    )  # fmt: skip


def _flash(c: GptConfig, flops: float) -> tuple[Operator, ...]:
    """Return attention as one kernel; the gradients of queries, keys and values are put together."""
    gradients = _elementwise("attention", 3.0 * c.dim, 0, 2, DIVIDED)
    return attention_core("attention", flops=flops, queries=c.dim, keys=c.dim, num_heads=c.num_heads), gradients


def _scores(c: GptConfig, scores: float) -> tuple[Operator, ...]:
    """Return attention with scores of all pairs of tokens, of which a fused kernel computes the masked softmax."""
    # The products write and read scores and their gradients, two in the forward and four in the backward.
    core = Operator(
        "attention", OperatorKind.ATTENTION, attention_flops=4.0 * scores * c.dim / c.num_heads,
        forward=Kernels(1, DIVIDED.narrow(2.0 * scores + 4.0 * c.dim)),
        backward=Kernels(3, DIVIDED.narrow(4.0 * scores + 8.0 * c.dim)), rerun=Rerun.ALWAYS,
    )  # fmt: skip
    return core, _elementwise("attention.softmax", scores, 4.5, 5.5, DIVIDED, rerun=Rerun.ALWAYS)


def _elementwise(
    name: str, size: float, forward: float, backward: float, sharding: Sharding, rerun: Rerun = Rerun.FULL
) -> Operator:
    """Return a kernel that moves this many elements for each element of a tensor."""
    passes = [
        Kernels(1, sharding.narrow(size * moved)) if size and moved else Kernels() for moved in (forward, backward)
    ]
    return Operator(
        name, OperatorKind.MEMORY, forward=passes[0], backward=passes[1], fused_forward=passes[0],
        fused_backward=passes[1], rerun=rerun,
    )  # fmt: skip


def _norm(name: str, dim: int) -> Operator:
    """Return a LayerNorm by one kernel, and its backward by two: of the input, and of weight and bias."""
    return _elementwise(name, dim, 2, 5, STREAM)


def _norm_weights(c: GptConfig, name: str) -> Any:
    return vectors(c.dim, *(f"{name}.{one}" for one in ("weight", "bias")[: 2 if c.bias else 1]))


def _loss(c: GptConfig) -> Operator:
    """Return the cross-entropy: Megatron's in float32, or llm-foundry's by one kernel."""
    return cross_entropy(c.vocab_size) if c.scores else _elementwise("loss", c.vocab_size, 1, 2, DIVIDED)


FAMILY = GptFamily()
