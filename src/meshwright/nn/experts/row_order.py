"""Order of rows by expert.

Shapes: c choices of an expert, e experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_expert(experts_c: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the choices in order of their experts, dropped ones last, and the number of choices of each expert."""
    sizes_e = experts_c.bincount(minlength=num_experts + 1)[:num_experts]
    # A sort of 16-bit keys takes half the time of one of 64-bit keys.
    keys_c = experts_c.to(torch.int16) if num_experts < torch.iinfo(torch.int16).max else experts_c
    return keys_c.argsort(stable=True), sizes_e
