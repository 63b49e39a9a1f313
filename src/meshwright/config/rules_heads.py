"""The rule of attention heads that all kinds of models have."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.breach import Breach
from meshwright.config.schema import DiTConfig, LlamaConfig
from meshwright.config.sizes import by_distance, divisors, round_up
from meshwright.errors import ConfigError


def undivided_heads(model: LlamaConfig | DiTConfig) -> Iterator[Breach]:
    """Heads that the width does not divide into."""
    if model.head_dim is None and model.dim % model.num_heads:
        heads = [{"model.num_heads": size} for size in by_distance(divisors(model.dim), model.num_heads)]
        multiple = round_up(model.dim, 2 * model.num_heads)
        width = round_up(multiple // model.num_heads, 2)
        yield Breach(
            ConfigError,
            f"model.num_heads = {model.num_heads} does not divide model.dim = {model.dim}",
            "model.num_heads",
            "without model.head_dim a head is dim / num_heads wide",
            [*heads[:1], {"model.dim": multiple}, *heads[1:], {"model.head_dim": width}],
        )
