"""Rule for attention heads, shared by families. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import ConfigError
from meshwright.settings.violation import Violation, by_distance, divisors, round_up


def head_violations(*, dim: int, num_heads: int, head_dim: int | None) -> Iterator[Violation]:
    """Yield a violation if `num_heads` does not divide the model's width."""
    if head_dim is None and dim % num_heads:
        heads = [{"model.num_heads": size} for size in by_distance(divisors(dim), num_heads)]
        multiple = round_up(dim, 2 * num_heads)
        width = round_up(multiple // num_heads, 2)
        yield Violation(
            ConfigError,
            f"model.num_heads = {num_heads} does not divide model.dim = {dim}",
            "model.num_heads",
            "model.head_dim defaults to dim / num_heads",
            [*heads[:1], {"model.dim": multiple}, *heads[1:], {"model.head_dim": width}],
        )
