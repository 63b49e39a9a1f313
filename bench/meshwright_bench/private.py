"""Adapter to the private PyTorch names that the benchmarks use.

Private PyTorch names: `torch.utils._python_dispatch.TorchDispatchMode`,
`torch.utils._pytree`; for PyTorch's redistribution planners `_redistribute.redistribute_local_tensor`,
`clear_redistribute_planner_cache` and `_gen_transform_infos`, `placement_types.shard_dim_alltoall`, `FakeStore`, and
`_resolve_process_group` of c10d; `torch.testing._internal` for `op_db`. Checked on torch 2.13.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.tensor import _redistribute as redistribution
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.errors import InputError

__all__ = [
    "FakeStore",
    "LiveBytes",
    "TorchDispatchMode",
    "clear_redistribution_caches",
    "operators",
    "redistribution",
    "resolve_process_group",
    "tree_leaves",
    "tree_map_only",
]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, counts the bytes of tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        """Bytes that live, the most that ever lived, and those of the largest tensor."""
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.now, self.largest = self.now + size, max(self.largest, size)
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def clear_redistribution_caches() -> None:
    """Clear the caches of PyTorch's redistribution planners."""
    redistribution.clear_redistribute_planner_cache()
    redistribution._gen_transform_infos.cache_clear()


def operators() -> list[Any]:
    """Return PyTorch's operator database, which includes samples.

    Raises:
        InputError: the database cannot be imported.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise InputError(
            f"PyTorch's operator samples need {error.name}, which is not installed",
            where="torch.testing._internal",
            rule="bench operators runs PyTorch's own samples",
            fix=f"pip install {error.name}",
        ) from error
    return list(op_db)
