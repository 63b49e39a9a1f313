"""Initializers for parameters and buffers, as values. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Normal:
    """Samples of N(0, std²) that depend only on the seed, name and position, so they are the same on every layout."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Samples of the uniform distribution in [-bound, bound), as independent of the layout as normal ones."""

    bound: float


@dataclass(frozen=True)
class Constant:
    """A constant value."""

    value: float


@dataclass(frozen=True)
class Computed:
    """Values computed by a function that returns the full tensor on the CPU, such as rotary frequencies."""

    compute: Callable[[], Tensor]


@dataclass(frozen=True)
class Stored:
    """Values in a file, of which a rank reads no more than its shard."""

    read: Callable[[Sequence[slice] | None], Tensor]
    """Returns a region of the full tensor, given one slice with start and stop per dim; for None, all of it."""


Fill = Normal | Uniform | Constant | Computed | Stored
ZEROS, ONES = Constant(0.0), Constant(1.0)
