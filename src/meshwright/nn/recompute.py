"""Recomputation: keep a block's input instead of its activations (Chen et al. 2016, "Training deep nets with sublinear
memory cost").

PyTorch's non-reentrant checkpointing: the reentrant one loses hooks, can't have an input without a gradient, and runs a
backward within a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`function(*inputs)`, whose activations are computed again when its backward needs them."""
    # Nothing here draws random numbers, so there is no state of a generator to put back.
    return cast(Tensor, checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False))
