"""Initial values of a parameter or a buffer. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Normal:
    """N(0, std²), a function of the seed, the name and the place alone, so the same on every layout."""

    std: float


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float


@dataclass(frozen=True)
class Computed:
    """A function of nothing that gives the full tensor on the CPU: rotary frequencies, tables."""

    compute: Callable[[], Tensor]


Fill = Normal | Constant | Computed
ZEROS, ONES = Constant(0.0), Constant(1.0)
