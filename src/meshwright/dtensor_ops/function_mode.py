"""Functions that no operator's rule can help, for `replicate_fallback`: they are seen before they become operators.

Some read memory before any operator is dispatched, and einsum becomes products of flattened dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshwright.dtensor_ops.private import tree_leaves, tree_map_only
from meshwright.dtensor_ops.refused_ops import storage_refused
from meshwright.dtensor_ops.sharded_einsum import einsum_on_pieces

POINTERS = (Tensor.data_ptr,)
"""A DTensor answers 0."""
READERS = (torch.tensor_split, Tensor.tensor_split)
"""They read a tensor of integers on the host."""
PRINTERS = (Tensor.tolist, Tensor.__format__)
"""Values go to the host; a tensor of another class than PyTorch's own is refused."""


class FunctionMode(TorchFunctionMode):
    """Sees every function of this thread before it becomes operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in POINTERS and isinstance(args[0], DTensor):
            raise storage_refused("Tensor.data_ptr")
        if func in PRINTERS and isinstance(args[0], DTensor):
            return func(args[0].full_tensor(), *args[1:])
        if func is torch.einsum and any(isinstance(x, DTensor) for x in tree_leaves(args)):
            result = einsum_on_pieces(*args, **kwargs)
            return func(*args, **kwargs) if result is None else result
        if func in READERS:
            read = tree_map_only(DTensor, lambda x: x.full_tensor(), (args[1:], kwargs))
            return func(args[0], *read[0], **read[1])
        return func(*args, **kwargs)
