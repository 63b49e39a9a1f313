"""Tensors and ranks in messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def type_words(dtype: torch.dtype) -> str:
    """A tensor's type: `float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_words(x: Tensor) -> str:
    """A tensor's type and shape: `float32 [2, 3]`."""
    return f"{type_words(x.dtype)} {list(x.shape)}"


def ranks_words(ranks: Sequence[int]) -> str:
    """Some ranks: `rank 3`, `ranks 0, 2`, `ranks 0 … 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} … {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
