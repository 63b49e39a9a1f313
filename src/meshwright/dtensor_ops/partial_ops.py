"""Operators that DTensor 2.13 gets wrong on partial values, done another way. A layer of the two contexts.

It answers each rank with its own part of a number: `x.sum().item()` is another one on every rank, and in inference
mode there is none. `fill_` makes every part of a sum the number, so that it is as many times too large. And what was
looked up in a tensor that is cut can be used once: the second use fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.private import OpOverload, gathered, own_tensor, without_masks
from meshwright.dtensor_ops.run_replicated import Call, Run
from meshwright.reshard.dtensor.placements import has_layout

aten = torch.ops.aten


def mended(call: Call, run: Run) -> Any:
    """What `call` returns, by `run`."""
    mend = MENDED.get(call.operator)
    return run(call) if mend is None or not isinstance(call.args[0], DTensor) else mend(call, run)


def _read(call: Call, run: Run) -> Any:
    """A number, from the whole tensor."""
    return call.operator(gathered(call.args[0]))


def _filled(call: Call, run: Run) -> Any:
    """Parts that make up the number: the number or what adds nothing to it, by where this rank stands."""
    x, number = call.args
    kinds = {axis: placement for axis, placement in enumerate(x.placements) if placement.is_partial()}
    coordinate = x.device_mesh.get_coordinate()
    if not kinds or not has_layout(x.placements) or coordinate is None:
        return run(call)
    for axis, placement in kinds.items():
        if coordinate[axis] and placement.reduce_op in NOTHING:
            number = NOTHING[placement.reduce_op]
    own_tensor(x).fill_(number)
    return x


def _looked_up(call: Call, run: Run) -> Any:
    """Rows that were looked up where they lie: parts of a sum that can be used more than once."""
    result = run(call)
    return without_masks(result) if isinstance(result, DTensor) else result


NOTHING = {"sum": 0, "product": 1}
"""What changes nothing, by reduction; of others, all parts may be the same."""
MENDED: dict[OpOverload, Callable[[Call, Run], Any]] = {
    aten._local_scalar_dense.default: _read,
    aten.item.default: _read,
    aten.is_nonzero.default: _read,
    aten.fill_.Scalar: _filled,
    aten.embedding.default: _looked_up,
    aten.gather.default: _looked_up,
}
"""By operator, the other way, if its first argument is a DTensor."""
