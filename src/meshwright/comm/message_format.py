"""Format dtypes, tensors and ranks for messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def format_dtype(dtype: torch.dtype) -> str:
    """Format a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def format_tensor(x: Tensor) -> str:
    """Format a tensor's dtype and shape, such as `float32 [2, 3]`."""
    return f"{format_dtype(x.dtype)} {list(x.shape)}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks, such as `rank 3`, `ranks 0, 2` or `ranks 0 … 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} … {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
