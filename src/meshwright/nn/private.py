"""Adapter for private PyTorch APIs: dispatch modes and version counters.

This is the only file of the room that uses private PyTorch names: `torch.utils._python_dispatch.TorchDispatchMode`,
`Tensor._version`, `UntypedStorage._cdata`, `OpOverload._schema`, and `_SetExcludeDispatchKeyGuard` and `DispatchKey` of
`torch._C`. Checked on 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def num_changes(x: Tensor) -> int:
    """Return how often the storage that a tensor shares with its views was modified in place."""
    return x._version


def storage_of(x: Tensor) -> int:
    """Return what identifies the storage that a tensor shares with its views."""
    return x.untyped_storage()._cdata  # type: ignore[no-any-return]


@cache
def _written(operator: Any) -> list[tuple[int, str]]:
    return [(at, x.name) for at, x in enumerate(operator._schema.arguments) if x.alias_info and x.alias_info.is_write]


def written_by(operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to in place."""
    return [args[at] if at < len(args) else named.get(name) for at, name in _written(operator)]


def detached(x: Tensor) -> Tensor:
    """Return `x.detach()` within a dispatch mode, where it would otherwise get a version counter of its own."""
    # As `torch.utils.checkpoint` does.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
