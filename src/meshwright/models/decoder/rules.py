"""Configuration rules of decoders: dimensions and tensor-parallel divisibility."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.attention_head_rule import head_violations
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.decoder.config import DecoderConfig
from meshwright.settings.violation import Violation, by_distance, divisors, round_up


def violations(model: DecoderConfig, f: RunFacts, *, has_dense: bool = True) -> Iterator[Violation]:
    """Yield the rules that a run violates; `has_dense` is False if no layer has a feed-forward layer."""
    yield from _model(model)
    yield from _window(model)
    yield from _tensor_parallel(model, f, has_dense=has_dense)


def _model(model: DecoderConfig) -> Iterator[Violation]:
    yield from head_violations(dim=model.dim, num_heads=model.num_heads, head_dim=model.head_dim)
    head_dim = model.spec().head_dim
    if head_dim % 2:
        counts = by_distance(divisors(model.dim // 2), model.num_heads) if model.head_dim is None else ()
        yield Violation(
            ConfigError,
            f"head_dim = {head_dim} is odd",
            "model.head_dim" if model.head_dim is not None else "model.dim",
            "rotary embedding rotates pairs, so head_dim is even",
            [{"model.head_dim": head_dim + 1}, *({"model.num_heads": count} for count in counts)],
        )
    if model.num_heads % model.num_kv_heads:
        sizes = by_distance(divisors(model.num_heads), model.num_kv_heads)
        divisible_heads = round_up(model.num_heads, model.num_kv_heads)
        yield Violation(
            ConfigError,
            f"model.num_kv_heads = {model.num_kv_heads} does not divide model.num_heads = {model.num_heads}",
            "model.num_kv_heads",
            "grouped-query attention gives every key/value head the same number of query heads",
            [*({"model.num_kv_heads": size} for size in sizes), {"model.num_heads": divisible_heads}],
        )


def _window(model: DecoderConfig) -> Iterator[Violation]:
    if model.global_every and model.window is None:
        yield Violation(
            ConfigError,
            f"model.global_every = {model.global_every} without model.window",
            "model.global_every",
            "every n-th layer differs from the others only if those have a sliding window",
            [{"model.global_every": 0}, {"model.window": 256}],
        )
    elif model.window is not None and (model.global_every == 1 or model.global_every > model.num_layers):
        has_window = model.global_every > 1
        yield Violation(
            ConfigError,
            f"model.global_every = {model.global_every}, but {'no' if has_window else 'every'} layer of "
            f"{model.num_layers} then attends to all earlier tokens",
            "model.global_every",
            "every n-th layer attends to all earlier tokens, and the others have a sliding window",
            [{"model.global_every": 0}] if has_window else [{"model.window": None, "model.global_every": 0}],
        )


def _tensor_parallel(model: DecoderConfig, f: RunFacts, *, has_dense: bool) -> Iterator[Violation]:
    tp = f.axes.tp
    counts = {
        "attention heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "feed-forward columns (model.ffn_dim)": model.ffn_dim,
        "vocabulary entries (model.vocab_size)": model.vocab_size,
    }
    if not has_dense:
        del counts["feed-forward columns (model.ffn_dim)"]
    if f.sequence_parallel:
        counts["tokens per sample (train.seq_len, with mesh.sequence_parallel)"] = f.seq_len
    name = next((name for name, count in counts.items() if count % tp), None)
    if name is None:
        return
    sizes = by_distance(divisors(math.gcd(*counts.values())), tp)
    yield Violation(
        LayoutError,
        f"mesh.tp = {tp} does not divide {counts[name]} {name}",
        "mesh.tp",
        "tp divides num_heads, num_kv_heads, ffn_dim, vocab_size and, with sequence_parallel, seq_len",
        [{"mesh.tp": size} for size in sizes],
    )
