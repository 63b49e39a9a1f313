"""Operators that DTensor 2.13 plans and computes wrongly, or fails on in the middle, and where: for the fallback.

All that is asked here is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.private import cut_dim, draws_by_itself, schema_of
from meshwright.dtensor_ops.refused_ops import name_of
from meshwright.dtensor_ops.run_replicated import Call


def is_broken(call: Call) -> bool:
    """DTensor would not return what one device does."""
    check = CHECKS.get(name_of(call.operator))
    if check is not None and check(call):
        return True
    return _draws(call) or any(isinstance(value, complex) for value in call.args)  # it can't hash a complex number


def _draws(call: Call) -> bool:
    """Each rank might draw random numbers by itself."""
    if torch.Tag.nondeterministic_seeded not in call.operator.tags or not draws_by_itself(call.operator):
        return False
    for place, argument in enumerate(schema_of(call.operator).arguments):
        if argument.name == "dropout_p":
            value = call.args[place] if place < len(call.args) else call.kwargs.get(argument.name)
            return bool(argument.default_value if value is None else value)
    return True


def cut(x: Any, first: int = 0) -> bool:
    """A DTensor that is cut along any of its dims from the `first` on."""
    dims = [cut_dim(placement) for placement in x.placements] if isinstance(x, DTensor) else []
    return any(dim is not None and dim >= first for dim in dims)


def partial(x: Any) -> bool:
    """A DTensor of partial values."""
    return isinstance(x, DTensor) and any(placement.is_partial() for placement in x.placements)


def _is_cut(call: Call) -> bool:
    return cut(call.args[0])


def _any_partial(call: Call) -> bool:
    return any(map(partial, call.dtensors()))


def _convolution(call: Call) -> bool:
    """With a kernel cut by output channels, or an image cut, a part of the result is passed off as all of it.

    An input cut by channels fails, and a partial one in the backward.
    """
    x, kernel, bias = call.args[:3]
    return cut(x, first=1) or cut(kernel) or cut(bias) or _any_partial(call)


def _convolution_backward(call: Call) -> bool:
    gradient, x, kernel = call.args[:3]
    return cut(gradient, first=1) or cut(x, first=1) or cut(kernel) or _any_partial(call)


def _shapes_differ(call: Call) -> bool:
    """Both are to be cut alike, along a dim that one may not have."""
    x, other = call.args
    return bool(x.shape != other.shape)


def _strides_matter(call: Call) -> bool:
    """It factors the transposed where its input is contiguous: the piece is asked, and for the gradient the whole."""
    x: DTensor = call.args[0]
    return not x.is_contiguous()


def _without_batch(call: Call) -> bool:
    """It takes the second dim for channels, which pools each by itself."""
    x: DTensor = call.args[0]
    return x.dim() == 3


def _has_no_elements(call: Call) -> bool:
    """Planning goes round for ever where a size is 0."""
    x: DTensor = call.args[0]
    return x.numel() == 0


def _to_eight_bits(call: Call) -> bool:
    """Parts of a sum stay parts, in numbers that are too short to be added up."""
    dtype: torch.dtype | None = call.kwargs.get("dtype")
    return dtype is not None and dtype.is_floating_point and dtype.itemsize == 1 and partial(call.args[0])


CHECKS: dict[str, Callable[[Call], bool]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    # A dim of which a rank holds one index is squeezed on that rank.
    "aten.squeeze_copy.default": _is_cut,
    "aten.squeeze_copy.dim": _is_cut,
    "aten.squeeze_copy.dims": _is_cut,
    "aten.equal.default": _shapes_differ,
    "aten._linalg_det.default": _strides_matter,
    "aten._linalg_slogdet.default": _strides_matter,
    "aten._adaptive_avg_pool2d_backward.default": _without_batch,
    "aten._to_copy.default": _to_eight_bits,
    "aten.view.default": _has_no_elements,
    "aten._unsafe_view.default": _has_no_elements,
    "aten.reshape.default": _has_no_elements,
}
"""By operator, whether it is wrong for a call."""
