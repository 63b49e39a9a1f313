"""Handlers of `replicate_fallback` for torch functions that must be intercepted before they decompose into operators.

Some functions read memory before they dispatch any operator, and einsum turns into matrix products of flattened dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshwright.dtensor_ops.private import tree_leaves, tree_map_only
from meshwright.dtensor_ops.refused_ops import storage_error
from meshwright.dtensor_ops.sharded_einsum import einsum_on_shards

POINTER_FUNCTIONS = (Tensor.data_ptr,)
"""Functions that return 0 for a DTensor."""
HOST_INDEX_FUNCTIONS = (torch.tensor_split, Tensor.tensor_split)
"""Functions that read an index tensor on the host."""
HOST_VALUE_FUNCTIONS = (Tensor.tolist, Tensor.__format__)
"""Functions that copy values to the host and reject tensor subclasses."""


class OpFunctionMode(TorchFunctionMode):
    """Function mode that intercepts all torch functions on this thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in POINTER_FUNCTIONS and isinstance(args[0], DTensor):
            raise storage_error("Tensor.data_ptr")
        if func in HOST_VALUE_FUNCTIONS and isinstance(args[0], DTensor):
            return func(args[0].full_tensor(), *args[1:])
        if func is torch.einsum and any(isinstance(x, DTensor) for x in tree_leaves(args)):
            result = einsum_on_shards(*args, **kwargs)
            return func(*args, **kwargs) if result is None else result
        if func in HOST_INDEX_FUNCTIONS:
            full = tree_map_only(DTensor, lambda x: x.full_tensor(), (args[1:], kwargs))
            return func(args[0], *full[0], **full[1])
        return func(*args, **kwargs)
