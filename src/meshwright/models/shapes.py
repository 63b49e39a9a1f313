"""A parameter, and the part of a model on a pipeline stage, as plans know them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a model: what a pipeline stage holds of it."""

    layers: range
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """Has what comes before the layers, and takes the model's inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Has what comes after the layers, and gives the model's outputs."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True)
class ParameterShape:
    """Name, shape, and the dim that tensor parallel divides; None where every rank of tp has all of it."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None

    def on_rank(self, *, tp: int, dp_shard: int) -> int:
        """Elements on the rank that holds most: FSDP2 gives its first ranks one row more where they don't divide."""
        sizes = list(self.shape)
        if self.tp_dim is not None:
            sizes[self.tp_dim] //= tp
        return -(-sizes[0] // dp_shard) * prod(sizes[1:])


def in_blocks(block: Iterable[ParameterShape], layers: range) -> list[ParameterShape]:
    """The parameters of each of these blocks, given those of one."""
    block = tuple(block)
    return [replace(one, name=f"blocks.{layer}.{one.name}") for layer in layers for one in block]
