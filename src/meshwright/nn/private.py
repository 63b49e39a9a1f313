"""Adapter for private PyTorch APIs: dispatch modes and version counters.

This is the only file of the room that uses private PyTorch names: `torch.utils._python_dispatch.TorchDispatchMode` and
`Tensor._version`. Checked on 2.13.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def num_changes(x: Tensor) -> int:
    """Return how often the storage that a tensor shares with its views was modified in place."""
    return x._version
