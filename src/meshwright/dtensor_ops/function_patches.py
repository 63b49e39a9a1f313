"""Patches of `replicate_fallback` for torch functions that must be intercepted before they decompose into operators.

Some functions read memory before they dispatch any operator, and einsum turns into matrix products of flattened dims.
Only these functions are patched, while the fallback is active on some thread; a function mode would intercept all of
them, on plain tensors too, and take about a tenth of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.private import EINSUM_OWNER, tree_leaves, tree_map_only
from meshwright.dtensor_ops.private_dispatch import Patches, active_interceptor
from meshwright.dtensor_ops.refused_ops import storage_error
from meshwright.dtensor_ops.sharded_einsum import einsum_on_shards

Function = Callable[..., Any]


def _refuse_pointer(function: Function, *args: Any) -> Any:
    """Refuse `data_ptr`, which returns 0 for a DTensor."""
    raise storage_error("Tensor.data_ptr")


def _read_full(function: Function, x: DTensor, *args: Any) -> Any:
    """Copy the full values to the host; PyTorch rejects tensor subclasses."""
    return getattr(x.full_tensor(), function.__name__)(*args)


def _split_at_index(function: Function, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a function that reads an index tensor on the host with the full index."""
    full_args, full_kwargs = tree_map_only(DTensor, lambda index: index.full_tensor(), (args, kwargs))
    return function(x, *full_args, **full_kwargs)


def _einsum(function: Function, equation: Any, *operands: Any, **kwargs: Any) -> Any:
    result = einsum_on_shards(equation, *operands)
    return function(equation, *operands, **kwargs) if result is None else result


FUNCTIONS: tuple[tuple[Any, str, Function], ...] = (
    (DTensor, "data_ptr", _refuse_pointer),
    (DTensor, "tolist", _read_full),
    (DTensor, "__format__", _read_full),
    (torch, "tensor_split", _split_at_index),
    (Tensor, "tensor_split", _split_at_index),
    (EINSUM_OWNER, "einsum", _einsum),
)
"""Owner and name of each function, and what replaces it for calls with DTensors; the first argument is the original."""


def _patched(original: Function, replacement: Function) -> Function:
    def function(*args: Any, **kwargs: Any) -> Any:
        context = active_interceptor()
        if context is None or not context.intercepts_functions:
            return original(*args, **kwargs)
        if not any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    return function


def _patches() -> list[tuple[Any, str, Function]]:
    return [(owner, name, _patched(getattr(owner, name), replacement)) for owner, name, replacement in FUNCTIONS]


_PATCHES = Patches(_patches)


@contextmanager
def function_patches() -> Iterator[None]:
    """Intercept the functions within the block, for contexts that intercept functions."""
    _PATCHES.acquire()
    try:
        yield
    finally:
        _PATCHES.release()
