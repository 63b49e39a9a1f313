"""Adapter for private PyTorch APIs: dispatch modes and version counters.

This is the only file of the room that uses private PyTorch names: `torch.utils._python_dispatch.TorchDispatchMode`,
`Tensor._version`, and `_SetExcludeDispatchKeyGuard` and `DispatchKey` of `torch._C`. Checked on
2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def num_changes(x: Tensor) -> int:
    """Return how often the storage that a tensor shares with its views was modified in place."""
    return x._version


def detached(x: Tensor) -> Tensor:
    """Return `x.detach()` within a dispatch mode, where it would otherwise get a version counter of its own."""
    # As `torch.utils.checkpoint` does.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
