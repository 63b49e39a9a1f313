"""Layer that corrects operators that DTensor 2.13 computes incorrectly on partial values.

DTensor reads a scalar from the local partial value, so `x.sum().item()` differs between ranks; it also fails in
inference mode. `fill_` sets every partial value to the fill value, so the sum is too large by a factor of the number
of ranks. The result of a lookup in a sharded tensor can be used only once: a second use fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.private import OpOverload, apply_masks, gather_full, local_tensor
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp
from meshwright.reshard.dtensor.placements import has_layout

aten = torch.ops.aten


def correct_partial_ops(call: OpCall, run: RunOp) -> Any:
    """Compute `call` with its correction if there is one, else with `run`."""
    correct = CORRECTIONS.get(call.operator)
    return run(call) if correct is None or not isinstance(call.args[0], DTensor) else correct(call, run)


def _read_scalar(call: OpCall, run: RunOp) -> Any:
    """Read the scalar from the full tensor."""
    return call.operator(gather_full(call.args[0]))


def _fill_partial(call: OpCall, run: RunOp) -> Any:
    """Fill with the value on the first rank of each sum or product, and with the identity on the other ranks."""
    x, value = call.args
    partials = {axis: placement for axis, placement in enumerate(x.placements) if placement.is_partial()}
    coordinate = x.device_mesh.get_coordinate()
    if not partials or not has_layout(x.placements) or coordinate is None:
        return run(call)
    for axis, placement in partials.items():
        if coordinate[axis] and placement.reduce_op in IDENTITIES:
            value = IDENTITIES[placement.reduce_op]
    local_tensor(x).fill_(value)
    return x


def _unmask_lookup(call: OpCall, run: RunOp) -> Any:
    """Return the lookup's result as plain partial sums, which can be used more than once."""
    result = run(call)
    return apply_masks(result) if isinstance(result, DTensor) else result


IDENTITIES = {"sum": 0, "product": 1}
"""Identity elements by reduction; other reductions allow the same value on all ranks."""
CORRECTIONS: dict[OpOverload, Callable[[OpCall, RunOp], Any]] = {
    aten._local_scalar_dense.default: _read_scalar,
    aten.item.default: _read_scalar,
    aten.is_nonzero.default: _read_scalar,
    aten.fill_.Scalar: _fill_partial,
    aten.embedding.default: _unmask_lookup,
    aten.gather.default: _unmask_lookup,
}
"""Corrections by operator, for calls whose first argument is a DTensor."""
