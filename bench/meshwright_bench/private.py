"""Adapter to the private PyTorch names that the benchmarks use.

Private PyTorch names: `torch.utils._python_dispatch.TorchDispatchMode`,
`torch.utils._pytree`; for PyTorch's redistribution planners `_redistribute.redistribute_local_tensor`,
`clear_redistribute_planner_cache` and `_gen_transform_infos`, `placement_types.shard_dim_alltoall`, `FakeStore`, and
`_resolve_process_group` of c10d; `torch.testing._internal` for `op_db`. Checked on torch 2.13.
"""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.tensor import _redistribute as redistribution
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.errors import InputError

__all__ = [
    "FakeStore",
    "TorchDispatchMode",
    "clear_redistribution_caches",
    "operators",
    "redistribution",
    "resolve_process_group",
    "tree_leaves",
    "tree_map_only",
]


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
