"""Operators that DTensor 2.13 gets wrong on partial values, done another way. A layer of the two contexts.

It answers each rank with its own part of a number: `x.sum().item()` is another one on every rank, and in inference
mode there is none. And it takes every rank's part from a number: `1 - x.sum()` has as many ones as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.reshard.copies import Call, Run
from meshwright.reshard.private import OpOverload, gathered

aten = torch.ops.aten


def mended(call: Call, run: Run) -> Any:
    """What `call` returns, by `run`."""
    mend = MENDED.get(call.operator)
    return run(call) if mend is None or not isinstance(call.args[0], DTensor) else mend(call, run)


def _read(call: Call, run: Run) -> Any:
    """A number, from the whole tensor."""
    return call.operator(gathered(call.args[0]))


def _taken_from(call: Call, run: Run) -> Any:
    """`other - alpha * x` as a sum of two, of which partial ones are added up first."""
    x, other, *alpha = call.args
    if not any(placement.is_partial() for placement in x.placements):
        return run(call)
    factor = alpha[0] if alpha else call.kwargs.get("alpha", 1)
    scaled = run(Call(aten.mul.Scalar, (x, -factor)))
    add = aten.add.Tensor if isinstance(other, Tensor) else aten.add.Scalar
    return run(Call(add, (scaled, other)))


MENDED: dict[OpOverload, Callable[[Call, Run], Any]] = {
    aten._local_scalar_dense.default: _read,
    aten.item.default: _read,
    aten.is_nonzero.default: _read,
    aten.rsub.Scalar: _taken_from,
    aten.rsub.Tensor: _taken_from,
}
"""By operator, the other way, if its first argument is a DTensor."""
