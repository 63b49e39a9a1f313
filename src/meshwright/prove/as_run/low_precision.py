"""Find sums and weights that are kept in bfloat16 where float32 was asked: all of their values are bfloat16 numbers.

Computing in bfloat16 rounds as coarsely as reducing in it, so the size of an error can't tell them apart. But the
float32 sum of several bfloat16 contributions needs more digits, in all but about half of the elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEARLY_ALL = 0.98
MIN_ELEMENTS = 48
"""Fewest sums to judge by: of right ones, up to about half are bfloat16 numbers by chance."""
MIN_WEIGHTS = 4
"""Fewest weights to judge by: of right ones, one in 65,536 is a bfloat16 number by chance."""
COMPARABLE = 2.0**-6
"""A contribution below this fraction of the largest one may be lost in rounding by chance."""


def is_on_grid(value: Tensor, divisors: tuple[int, ...] = (1,)) -> Tensor:
    """Return which float32 elements, times one of the divisors of a mean, are bfloat16 numbers."""
    found = torch.zeros(value.shape, dtype=torch.bool)
    for divisor in divisors:
        scaled = value.float() * divisor
        found |= scaled.bfloat16().float() == scaled
    return found


def is_summed(contributions: Tensor) -> Tensor:
    """Return which elements are sums of at least two contributions of comparable size, given [contribution, *shape]."""
    if len(contributions) < 2:
        return torch.zeros(contributions.shape[1:], dtype=torch.bool)
    top = contributions.abs().topk(2, dim=0).values
    return (top[1] > 0) & (top[1] >= COMPARABLE * top[0])


def looks_rounded(num_on_grid: int, num_elements: int, *, least: int = MIN_ELEMENTS) -> bool:
    """Return whether so many of at least `least` elements are bfloat16 numbers that all of them were rounded."""
    return num_elements >= least and num_on_grid >= NEARLY_ALL * num_elements
