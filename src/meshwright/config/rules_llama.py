"""Rules of a Llama: its dimensions, and what tensor parallel divides."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.config.breach import Breach
from meshwright.config.rules_heads import undivided_heads
from meshwright.config.schema import LlamaConfig, RunConfig
from meshwright.config.sizes import by_distance, divisors, round_up
from meshwright.errors import ConfigError, LayoutError


def llama_breaches(config: RunConfig) -> Iterator[Breach]:
    """The rules of a Llama that `config` breaks."""
    assert isinstance(config.model, LlamaConfig), "rules of another kind of model"
    yield from _model(config.model)
    yield from _tensor_parallel(config.model, config)


def _model(model: LlamaConfig) -> Iterator[Breach]:
    yield from undivided_heads(model)
    head_dim = model.spec().head_dim
    if head_dim % 2:
        yield Breach(
            ConfigError,
            f"a head is {head_dim} wide",
            "model.head_dim" if model.head_dim is not None else "model.dim",
            "rotary embedding turns pairs: head_dim is even",
            [{"model.head_dim": head_dim + 1}],
        )
    if model.num_heads % model.num_kv_heads:
        sizes = by_distance(divisors(model.num_heads), model.num_kv_heads)
        heads_then = round_up(model.num_heads, model.num_kv_heads)
        yield Breach(
            ConfigError,
            f"model.num_kv_heads = {model.num_kv_heads} does not divide model.num_heads = {model.num_heads}",
            "model.num_kv_heads",
            "grouped-query attention gives every key/value head the same number of query heads",
            [*({"model.num_kv_heads": size} for size in sizes), {"model.num_heads": heads_then}],
        )


def _tensor_parallel(model: LlamaConfig, config: RunConfig) -> Iterator[Breach]:
    mesh = config.mesh
    counts = {
        "attention heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "feed-forward columns (model.ffn_dim)": model.ffn_dim,
        "vocabulary entries (model.vocab_size)": model.vocab_size,
    }
    if mesh.sequence_parallel:
        counts["tokens a sample (train.seq_len, with mesh.sequence_parallel)"] = config.train.seq_len
    name = next((name for name, count in counts.items() if count % mesh.tp), None)
    if name is None:
        return
    sizes = by_distance(divisors(math.gcd(*counts.values())), mesh.tp)
    yield Breach(
        LayoutError,
        f"mesh.tp = {mesh.tp} does not divide {counts[name]} {name}",
        "mesh.tp",
        "tp divides the numbers of heads, of key/value heads, ffn_dim, vocab_size, "
        "and seq_len when sequence_parallel is on",
        [{"mesh.tp": size} for size in sizes],
    )
