"""Layer that computes mean losses of sharded inputs as a global sum divided by the global count.

DTensor 2.13 averages the averages of the shards, which is incorrect if shards have different weights, because a dim is
sharded unevenly or classes are ignored or weighted. Its gradients of elementwise mean losses divide by the shard size,
so they are too large by a factor of the number of shards. Sums have neither problem and need no extra communication.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import torch

from meshwright.dtensor_ops.private import OpOverload, has_custom_handler, schema_of
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp

aten = torch.ops.aten


class LossReduction(IntEnum):
    """The `reduction` argument of ATen loss operators."""

    NONE = 0
    MEAN = 1
    SUM = 2


ELEMENTWISE_LOSSES = frozenset({
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
})  # fmt: skip
"""Elementwise losses of an input and a target."""
ELEMENTWISE_BACKWARD = frozenset({
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
})  # fmt: skip
"""Backward operators of elementwise losses: gradient, input, target."""
CLASS_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Classification losses, which also return the total weight; it makes their gradients correct."""
MEAN_LOSSES = ELEMENTWISE_LOSSES | ELEMENTWISE_BACKWARD | CLASS_LOSSES
"""All operators that this layer may change."""


def correct_mean_losses(call: OpCall, run: RunOp) -> Any:
    """Compute `call` with `run`, replacing mean losses by sums."""
    operator = call.operator
    if operator in CLASS_LOSSES:
        return _mean_class_loss(call, run)
    if operator not in MEAN_LOSSES:
        return run(call)
    if _reduction(call) is not LossReduction.MEAN or not _has_sharded_input(call):
        return run(call)
    if operator in ELEMENTWISE_LOSSES:
        return _mean_elementwise_loss(call, run)
    gradient, *inputs = call.args
    scaled = run(OpCall(aten.div.Scalar, (gradient, _num_elements(inputs))))
    return run(_with_reduction(OpCall(operator, (scaled, *inputs), call.kwargs), LossReduction.SUM))


def _mean_elementwise_loss(call: OpCall, run: RunOp) -> Any:
    dtype = call.args[0].dtype
    if dtype is not torch.float16:
        total = run(_with_reduction(call, LossReduction.SUM))
        return run(OpCall(aten.div.Scalar, (total, _num_elements(call.args))))
    elements = run(_with_reduction(call, LossReduction.NONE))  # a sum may overflow float16
    total = run(OpCall(aten.sum.default, (elements,), {"dtype": torch.float32}))
    mean = run(OpCall(aten.div.Scalar, (total, _num_elements(call.args))))
    return run(OpCall(aten._to_copy.default, (mean,), {"dtype": dtype}))


def _mean_class_loss(call: OpCall, run: RunOp) -> Any:
    is_loss_parallel = has_custom_handler(call.operator)
    if is_loss_parallel or _reduction(call) is not LossReduction.MEAN or not _has_sharded_input(call):
        return run(call)
    total, weight = run(_with_reduction(call, LossReduction.SUM))
    return run(OpCall(aten.div.Tensor, (total, weight))), weight


def _has_sharded_input(call: OpCall) -> bool:
    return any(not placement.is_replicate() for tensor in call.dtensors() for placement in tensor.placements)


def _num_elements(inputs: Any) -> int:
    x, target = inputs[:2]
    return math.prod(torch.broadcast_shapes(x.shape, target.shape))  # type: ignore[no-untyped-call]


def _reduction_index(operator: OpOverload) -> int:
    return next(i for i, argument in enumerate(schema_of(operator).arguments) if argument.name == "reduction")


def _reduction(call: OpCall) -> LossReduction:
    index = _reduction_index(call.operator)
    default: Any = schema_of(call.operator).arguments[index].default_value
    return LossReduction(call.args[index] if index < len(call.args) else call.kwargs.get("reduction", default))


def _with_reduction(call: OpCall, reduction: LossReduction) -> OpCall:
    index = _reduction_index(call.operator)
    if index >= len(call.args):
        return OpCall(call.operator, call.args, call.kwargs | {"reduction": int(reduction)})
    return OpCall(call.operator, (*call.args[:index], int(reduction), *call.args[index + 1 :]), call.kwargs)
