"""Averages of losses over pieces: the sum of all, divided by the number of all. A layer of the two contexts.

DTensor 2.13 averages each rank's piece and then the averages, which is right only where all pieces count the same:
not where a dim is cut unevenly, nor where classes are ignored or weighted. Its gradients of averages over elements
divide by the size of the piece, and are too large by as many times as there are pieces. Sums have neither fault, and
take no more messages.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import torch

from meshwright.dtensor_ops.private import OpOverload, has_handler, schema_of
from meshwright.dtensor_ops.run_replicated import Call, Run

aten = torch.ops.aten


class Reduction(IntEnum):
    """What operators take as their `reduction`."""

    NONE = 0
    MEAN = 1
    SUM = 2


ELEMENTS = frozenset({
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
})  # fmt: skip
"""Losses of an input and a target, element by element."""
ELEMENTS_BACKWARD = frozenset({
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
})  # fmt: skip
"""Their gradients: of the result, the input and the target."""
CLASSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Losses of classes, which also return the sum of weights; their gradients take it, and are right."""


def losses(call: Call, run: Run) -> Any:
    """What `call` returns, by `run`."""
    operator = call.operator
    if operator in CLASSES:
        return _of_classes(call, run)
    if operator not in ELEMENTS and operator not in ELEMENTS_BACKWARD:
        return run(call)
    if _reduction(call) is not Reduction.MEAN or not _lies_in_parts(call):
        return run(call)
    if operator in ELEMENTS:
        return _of_elements(call, run)
    gradient, *others = call.args
    share = run(Call(aten.div.Scalar, (gradient, _size(others))))
    return run(_with_reduction(Call(operator, (share, *others), call.kwargs), Reduction.SUM))


def _of_elements(call: Call, run: Run) -> Any:
    dtype = call.args[0].dtype
    if dtype is not torch.float16:
        total = run(_with_reduction(call, Reduction.SUM))
        return run(Call(aten.div.Scalar, (total, _size(call.args))))
    each = run(_with_reduction(call, Reduction.NONE))  # whose sum may be too large for its type
    total = run(Call(aten.sum.default, (each,), {"dtype": torch.float32}))
    return run(Call(aten._to_copy.default, (run(Call(aten.div.Scalar, (total, _size(call.args)))),), {"dtype": dtype}))


def _of_classes(call: Call, run: Run) -> Any:
    is_taken = has_handler(call.operator)  # by PyTorch's `loss_parallel`
    if is_taken or _reduction(call) is not Reduction.MEAN or not _lies_in_parts(call):
        return run(call)
    total, weight = run(_with_reduction(call, Reduction.SUM))
    return run(Call(aten.div.Tensor, (total, weight))), weight


def _lies_in_parts(call: Call) -> bool:
    return any(not placement.is_replicate() for tensor in call.dtensors() for placement in tensor.placements)


def _size(inputs: Any) -> int:
    x, target = inputs[:2]
    return math.prod(torch.broadcast_shapes(x.shape, target.shape))  # type: ignore[no-untyped-call]


def _place(operator: OpOverload) -> int:
    return next(place for place, one in enumerate(schema_of(operator).arguments) if one.name == "reduction")


def _reduction(call: Call) -> Reduction:
    place = _place(call.operator)
    default: Any = schema_of(call.operator).arguments[place].default_value
    return Reduction(call.args[place] if place < len(call.args) else call.kwargs.get("reduction", default))


def _with_reduction(call: Call, reduction: Reduction) -> Call:
    place = _place(call.operator)
    if place >= len(call.args):
        return Call(call.operator, call.args, call.kwargs | {"reduction": int(reduction)})
    return Call(call.operator, (*call.args[:place], int(reduction), *call.args[place + 1 :]), call.kwargs)
