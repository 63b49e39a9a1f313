"""What a model is, as a value: its dimensions, and the exact counts that follow from them.

Torch-free, so a plan or a validation error needs no accelerator and no second of start-up. The counts are
tested against the real modules.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.models.dit_spec import DiTSpec
from meshwright.models.shapes import ParameterShape, in_blocks
from meshwright.pipeline.shared import SharedParameter


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies to longer contexts (Llama 3 herd of models, section 3.4).

    Wavelengths longer than `original_seq_len / low_freq_factor` are stretched by `factor`, those shorter than
    `original_seq_len / high_freq_factor` are kept, and those between are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192


@dataclass(frozen=True)
class LlamaSpec:
    """Dimensions of a Llama (Touvron et al. 2023; grouped-query attention of Ainslie et al. 2023)."""

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

    def shared_parameters(self, num_stages: int) -> tuple[SharedParameter, ...]:
        """What the model's parts share, in a pipeline of so many stages: a tied embedding, on first and last."""
        if num_stages == 1 or not self.tie_embeddings:
            return ()
        return (SharedParameter("embed.weight", ((0, "embed.weight"), (num_stages - 1, "head.weight"))),)

    def part_parameters(self, layers: range, *, is_first: bool, is_last: bool) -> list[ParameterShape]:
        """Parameters of the part of the model that has these layers, in the module's order."""
        dim, queries, keys = self.dim, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        block = (
            ParameterShape("attention_norm.weight", (dim,)),
            ParameterShape("attention.wq.weight", (queries, dim), 0),
            ParameterShape("attention.wk.weight", (keys, dim), 0),
            ParameterShape("attention.wv.weight", (keys, dim), 0),
            ParameterShape("attention.wo.weight", (dim, queries), 1),
            ParameterShape("ffn_norm.weight", (dim,)),
            ParameterShape("ffn.gate.weight", (self.ffn_dim, dim), 0),
            ParameterShape("ffn.up.weight", (self.ffn_dim, dim), 0),
            ParameterShape("ffn.down.weight", (dim, self.ffn_dim), 1),
        )
        first = [ParameterShape("embed.weight", (self.vocab_size, dim), 0)] if is_first else []
        last = [ParameterShape("norm.weight", (dim,))] if is_last else []
        if is_last and not (self.tie_embeddings and is_first):
            last.append(ParameterShape("head.weight", (self.vocab_size, dim), 0))
        return [*first, *in_blocks(block, layers), *last]

    def parameter_names(self) -> list[str]:
        """Every parameter of the model."""
        return [p.name for p in self.part_parameters(range(self.num_layers), is_first=True, is_last=True)]

    def params_per_layer(self) -> int:
        """Parameters of one transformer block."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.dim * self.ffn_dim + 2 * self.dim

    def num_params(self) -> int:
        """Parameters of the whole model; a tied embedding counts once."""
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * self.params_per_layer() + self.dim

    def matmul_params(self) -> int:
        """Weights that every token is multiplied with: blocks and output head, without norms or the lookup."""
        return self.num_layers * (self.params_per_layer() - 2 * self.dim) + self.vocab_size * self.dim

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward for one token.

        6 per matmul weight, and 12 · heads · head_dim · seq_len / 2 a layer for causal attention, whose upper
        triangle is not computed (PaLM, appendix B, halved for causality).
        """
        attention = 6 * self.num_layers * self.num_heads * self.head_dim * seq_len
        return 6.0 * self.matmul_params() + attention

    def layer_flops(self, seq_len: int) -> float:
        """Forward floating-point operations of one block for one token."""
        matmuls = 2.0 * (self.params_per_layer() - 2 * self.dim)
        return matmuls + 2.0 * self.num_heads * self.head_dim * seq_len

    def head_flops(self) -> float:
        """Forward floating-point operations of the output head for one token."""
        return 2.0 * self.vocab_size * self.dim

    def embedding_flops(self) -> float:
        """What the lookup costs a token: it moves a row, and its backward adds one."""
        return 2.0 * self.dim

    def identity(self) -> dict[str, Any]:
        """Everything that decides names and shapes of the parameters and what they mean: a checkpoint's identity."""
        return {"kind": "llama", **asdict(self)}


ModelSpec = LlamaSpec | DiTSpec
