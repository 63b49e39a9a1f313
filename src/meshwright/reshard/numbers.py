"""Numbers that are read from DTensors: `item()`, `float(…)`, `bool(…)`. A layer of the two contexts.

DTensor 2.13 answers each rank with its own part of a partial value: `x.sum().item()` is another number on every rank.
In inference mode it answers nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.reshard.copies import Call, Run
from meshwright.reshard.private import gathered

aten = torch.ops.aten
READ = frozenset({aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default})
"""Operators that read the number of a tensor that has one."""


def numbers(call: Call, run: Run) -> Any:
    """What `call` returns, by `run`; a number is read from the whole tensor."""
    if call.operator not in READ or not isinstance(call.args[0], DTensor):
        return run(call)
    return call.operator(gathered(call.args[0]))
