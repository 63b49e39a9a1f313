"""Checks for operator calls that must fall back because DTensor 2.13 computes them incorrectly or fails midway.

Each check depends only on properties that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.interception import has_empty_list
from meshwright.dtensor_ops.private import OpOverload, draws_per_rank, schema_of, shard_dim
from meshwright.dtensor_ops.refused_ops import name_of
from meshwright.dtensor_ops.run_replicated import OpCall

aten = torch.ops.aten


def is_incorrect(call: OpCall) -> bool:
    """Return True if DTensor's result would differ from the result on one device."""
    check = CHECKS.get(name_of(call.operator))
    if (check is not None and check(call)) or _reduces_all_dims(call):
        return True
    # DTensor cannot hash complex arguments.
    return _draws(call) or any(isinstance(value, complex) for value in call.args)


def _reduces_all_dims(call: OpCall) -> bool:
    """Check for an empty list of dims, as in the backward of a norm: ATen reduces over all dims, DTensor over none."""
    if not has_empty_list(call.args):
        return False
    arguments = zip(schema_of(call.operator).arguments, call.args, strict=False)
    return is_sharded(call.args[0]) and any(one.name == "dim" and value == [] for one, value in arguments)


def _draws(call: OpCall) -> bool:
    """Return True if each rank may draw its own random numbers."""
    if torch.Tag.nondeterministic_seeded not in call.operator.tags or not draws_per_rank(call.operator):
        return False
    for index, argument in enumerate(schema_of(call.operator).arguments):
        if argument.name == "dropout_p":
            value = call.args[index] if index < len(call.args) else call.kwargs.get(argument.name)
            return bool(argument.default_value if value is None else value)
    return True


def is_sharded(x: Any, first_dim: int = 0) -> bool:
    """Return True if `x` is a DTensor sharded along any dim from `first_dim` on."""
    dims = [shard_dim(placement) for placement in x.placements] if isinstance(x, DTensor) else []
    return any(dim is not None and dim >= first_dim for dim in dims)


def is_partial(x: Any) -> bool:
    """Return True if `x` is a DTensor with partial values."""
    return isinstance(x, DTensor) and any(placement.is_partial() for placement in x.placements)


def _is_input_sharded(call: OpCall) -> bool:
    return is_sharded(call.args[0])


def _any_partial(call: OpCall) -> bool:
    return any(map(is_partial, call.dtensors()))


def _convolution(call: OpCall) -> bool:
    """Check for a sharded kernel or image: DTensor treats the partial result as the full one.

    An input sharded along channels fails in the forward pass, and a partial input in the backward pass.
    """
    x, kernel, bias = call.args[:3]
    return is_sharded(x, first_dim=1) or is_sharded(kernel) or is_sharded(bias) or _any_partial(call)


def _convolution_backward(call: OpCall) -> bool:
    gradient, x, kernel = call.args[:3]
    return is_sharded(gradient, first_dim=1) or is_sharded(x, first_dim=1) or is_sharded(kernel) or _any_partial(call)


def _shapes_differ(call: OpCall) -> bool:
    """Check for different shapes: DTensor shards both inputs alike, even along a dim that one of them lacks."""
    x, other = call.args
    return bool(x.shape != other.shape)


def _is_non_contiguous(call: OpCall) -> bool:
    """Check for a non-contiguous input: the forward tests the shard for contiguity, the backward the full tensor."""
    x: DTensor = call.args[0]
    return not x.is_contiguous()


def _is_unbatched(call: OpCall) -> bool:
    """Check for an unbatched input: DTensor mistakes its second dim for channels."""
    x: DTensor = call.args[0]
    return x.dim() == 3


def _has_no_elements(call: OpCall) -> bool:
    """Check for a dim of size 0, which makes DTensor's planning loop forever."""
    x: DTensor = call.args[0]
    return x.numel() == 0


def _is_partial_to_float8(call: OpCall) -> bool:
    """Check for a cast of partial values to float8, which does not support summation."""
    dtype: torch.dtype | None = call.kwargs.get("dtype")
    return dtype is not None and dtype.is_floating_point and dtype.itemsize == 1 and is_partial(call.args[0])


CHECKS: dict[str, Callable[[OpCall], bool]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    # A rank that holds one index of a sharded dim squeezes the dim.
    "aten.squeeze_copy.default": _is_input_sharded,
    "aten.squeeze_copy.dim": _is_input_sharded,
    "aten.squeeze_copy.dims": _is_input_sharded,
    "aten.equal.default": _shapes_differ,
    "aten._linalg_det.default": _is_non_contiguous,
    "aten._linalg_slogdet.default": _is_non_contiguous,
    "aten._adaptive_avg_pool2d_backward.default": _is_unbatched,
    "aten.native_group_norm_backward.default": lambda call: any(map(is_sharded, call.dtensors())),  # global sizes
    "aten._to_copy.default": _is_partial_to_float8,
    "aten.view.default": _has_no_elements,
    "aten._unsafe_view.default": _has_no_elements,
    "aten.reshape.default": _has_no_elements,
}
"""Checks by operator; a check returns True if DTensor computes the call incorrectly."""


PLANNED_CHECKS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
"""Operators in `CHECKS` that need not be intercepted on every call: DTensor plans each call without elements again."""
COMPLEX_SCALARS = (
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.add.Scalar,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.pow.Scalar,
)
"""Operators whose complex argument DTensor fails to hash before it plans anything."""


def intercepted_operators() -> list[OpOverload]:
    """Return the operators to check on every call."""
    names = [name.split(".")[1:] for name in CHECKS if name not in PLANNED_CHECKS]
    return [*(getattr(getattr(aten, packet), overload) for packet, overload in names), *COMPLEX_SCALARS]
