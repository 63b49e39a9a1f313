"""Order of rows by expert, without reading anything on the host.

Shapes: c choices of an expert, e experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_expert(experts_c: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the choices in order of their experts, dropped ones last, and the number of choices of each expert."""
    sizes_e = count(experts_c, num_experts + 1)[:num_experts]
    # A sort of 16-bit keys takes half the time of one of 64-bit keys.
    keys_c = experts_c.to(torch.int16) if num_experts < torch.iinfo(torch.int16).max else experts_c
    return keys_c.argsort(stable=True), sizes_e


def count(index_c: Tensor, num_values: int) -> Tensor:
    """Return how often each of 0 … num_values − 1 occurs, int64."""
    if not index_c.is_cuda:
        return index_c.bincount(minlength=num_values)
    # CUDA's bincount reads the maximum on the host. Sums of integers don't depend on the order of atomics.
    return index_c.new_zeros(num_values).scatter_add_(0, index_c, torch.ones_like(index_c))
