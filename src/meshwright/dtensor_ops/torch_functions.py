"""Interception by `replicate_fallback` of torch functions on DTensors before they decompose into operators.

Some functions read memory before they dispatch any operator, and einsum turns into matrix products of flattened dims.
DTensor's own `__torch_function__`, which does nothing, is replaced while the fallback is active on some thread. A
function mode would also intercept the functions of plain tensors, which takes about a tenth of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.private import tree_leaves, tree_map_only
from meshwright.dtensor_ops.refused_ops import storage_error
from meshwright.dtensor_ops.sharded_einsum import einsum_on_shards
from meshwright.reshard.dtensor import active_interceptor, run_torch_function
from meshwright.reshard.dtensor.interceptor import Patches


def _refuse_pointer(*args: Any) -> Any:
    """Refuse `data_ptr`, which returns 0 for a DTensor."""
    raise storage_error("Tensor.data_ptr")


def _read_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the full values to the host; PyTorch rejects tensor subclasses."""
    return func(args[0].full_tensor(), *args[1:])


def _split_at_full_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that reads an index tensor on the host with the full index."""
    full_args, full_kwargs = tree_map_only(DTensor, lambda index: index.full_tensor(), (args[1:], kwargs))
    return run_torch_function(func, (args[0], *full_args), full_kwargs)


def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    has_dtensor = any(isinstance(x, DTensor) for x in tree_leaves(args))
    result = einsum_on_shards(*args, **kwargs) if has_dtensor else None
    return run_torch_function(func, args, kwargs) if result is None else result


FUNCTIONS = {
    Tensor.data_ptr: _refuse_pointer,
    Tensor.tolist: _read_full,
    Tensor.__format__: _read_full,
    torch.tensor_split: _split_at_full_index,
    Tensor.tensor_split: _split_at_full_index,
    torch.einsum: _einsum,
}
"""Handlers by function, called with the function and its arguments."""


def _torch_function(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    handler = FUNCTIONS.get(func)
    if handler is not None:
        context = active_interceptor()
        if context is not None and context.intercepts_functions:
            return handler(func, args, kwargs or {})
    return run_torch_function(func, args, kwargs)


@cache
def _patch() -> Patches:
    return Patches(lambda: [(DTensor, "__torch_function__", classmethod(_torch_function))])


@contextmanager
def torch_functions() -> Iterator[None]:
    """Let contexts that intercept functions do so within the block."""
    _patch().acquire()
    try:
        yield
    finally:
        _patch().release()
