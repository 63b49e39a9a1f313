"""Operators without a sharding rule, on whole copies: `with replicate_fallback(): …`.

DTensor refuses an operator that nobody wrote a rule for, and one that is given plain tensors beside DTensors. In
this context such an operator is computed from its gathered inputs instead (`copies`), with a warning that says what
that costs. It works below autograd, so the backward of an operator falls back like its forward.

It sees each operator before DTensor does, on this thread only, and changes nothing of DTensor's. What DTensor can do
by itself it does: an operator is computed from copies only after DTensor failed while it was still planning, which it
does the same way on all ranks. A failure while computing is one rank's alone and is raised, but for one case that can
be known beforehand: where some rank's piece is empty (a dim of 3 cut over 4 ranks), many operators fail on that rank
and leave the others waiting. There the ranks agree first on whether anyone failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.consensus import on_any_rank, reduced
from meshwright.dtensor_ops.dispatch_mode import entered
from meshwright.dtensor_ops.function_mode import FunctionMode
from meshwright.dtensor_ops.incorrect_ops import is_broken
from meshwright.dtensor_ops.private import (
    OpOverload,
    as_copies,
    failed_in_planning,
    has_handler,
    is_cut,
    own_tensor,
    schema_of,
    tree_leaves,
    tree_map_only,
)
from meshwright.dtensor_ops.refused_ops import (
    OperatorError,
    is_storage,
    name_of,
    plain_refused,
    storage_refused,
)
from meshwright.dtensor_ops.run_replicated import Call, Run, gather_bytes, run_on_copies
from meshwright.dtensor_ops.shard_order_ops import works_by_element
from meshwright.dtensor_ops.sharding_rules import register_rules
from meshwright.log import get_logger
from meshwright.reshard.dtensor.placements import layout_ignoring_partial
from meshwright.units import format_bytes

_log = get_logger(__name__)

Warn = bool | Literal["error"]
KEEP_PIECES = ("new_", "slice", "select")
"""Names that begin like this, and what works element by element: nothing of an empty piece can fail."""
HANDLED = ("aten.as_strided.default",)
"""Operators that DTensor refuses by code of its own, before it plans."""


class Fallbacks:
    """What was computed from whole copies in one `replicate_fallback`.

    Attributes:
        counts: how often, by operator.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}


@contextmanager
def replicate_fallback(warn: Warn = True) -> Iterator[Fallbacks]:
    """Compute operators without a sharding rule from gathered copies of their inputs, on this thread.

    Results are laid out as the input of their shape is, else as copies. A plain tensor beside DTensors is taken as a
    copy if every rank has the same values. All else is as within `for_dtensor`: rules, plans, orders of cuts.

    Args:
        warn: True logs a warning at the first time of each operator, with the bytes that a rank receives; False says
            nothing; "error" raises instead of gathering, and nothing is moved.

    Raises:
        OperatorError: inside, for what no copies can give: operators on storage, random numbers, ….
    """
    register_rules()
    fallback = _Fallback(warn)
    with FunctionMode(), entered(fallback, gathers=fallback.count):
        yield fallback.fallbacks


class _Fallback:
    """A layer that computes from copies what DTensor can't."""

    def __init__(self, warn: Warn) -> None:
        self.fallbacks = Fallbacks()
        self._warn = warn

    def __call__(self, call: Call, run: Run) -> Any:
        """What `call` returns, by `run` where that works."""
        call = self._with_copies(call)
        if is_broken(call):
            return self._from_copies(call)
        if _has_empty_pieces(call) and not _keeps_to_elements(call.operator):
            return self._from_copies(call) if has_handler(call.operator) else self._all_or_none(call, run)
        try:
            return run(call)
        except Exception as error:
            if not _may_be_gathered(error) and name_of(call.operator) not in HANDLED:
                raise
        return self._from_copies(call)

    def _with_copies(self, call: Call) -> Call:
        """Plain tensors taken as copies; DTensor does so by itself with single numbers."""
        plain = [t for t in call.tensors() if not isinstance(t, DTensor) and t.numel() != 1]
        if not plain or self._warn == "error" or any(tensor.layout is not torch.strided for tensor in plain):
            return call
        mesh = call.mesh()
        for tensor in plain:
            if not _is_same_everywhere(tensor, mesh):
                raise plain_refused(call.operator, tuple(tensor.shape))
        chosen = {id(tensor): as_copies(tensor, mesh) for tensor in plain}
        args, kwargs = tree_map_only(Tensor, lambda t: chosen.get(id(t), t), (call.args, call.kwargs))
        return Call(call.operator, args, kwargs)

    def _all_or_none(self, call: Call, run: Run) -> Any:
        """DTensor's result if no rank failed to compute its part of it."""
        result, failed = None, None
        written = [own_tensor(tensor) for tensor in call.written() if isinstance(tensor, DTensor)]
        before = [tensor.clone() for tensor in written]
        try:
            result = run(call)
        except Exception as error:
            if _may_be_gathered(error):
                return self._from_copies(call)
            failed = error
        if not on_any_rank(failed is not None or not _fits(result), call.mesh()):
            return result
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
        return self._from_copies(call)

    def _from_copies(self, call: Call) -> Any:
        name = name_of(call.operator)
        if is_storage(call.operator, call.dtensors()):
            raise storage_refused(name)
        self.count(call)
        return run_on_copies(call)

    def count(self, call: Call) -> None:
        """Say and note that it is computed from whole tensors."""
        name = name_of(call.operator)
        self._say(name, call)
        self.fallbacks.counts[name] = self.fallbacks.counts.get(name, 0) + 1

    def _say(self, name: str, call: Call) -> None:
        inputs = {id(tensor): tensor for tensor in call.dtensors()}.values()
        cost = format_bytes(sum(gather_bytes(tensor) for tensor in inputs))
        if self._warn == "error":
            layouts = ", ".join(f"{tuple(tensor.shape)} {tensor.placements}" for tensor in inputs)
            raise OperatorError(
                f"{name} has no right sharding rule for {layouts}; gathering its inputs costs each rank {cost} a call",
                where='replicate_fallback(warn="error")',
                rule="every operator has a rule for the layouts it is called with",
                fix="register one with torch.distributed.tensor.experimental.register_sharding, redistribute the "
                "inputs first, or replicate_fallback(warn=True)",
            )
        if self._warn and name not in self.fallbacks.counts and not any(call.mesh().get_coordinate() or [0]):
            _log.warning("%s has no right sharding rule here: its inputs are gathered, %s a rank and call", name, cost)


def _may_be_gathered(error: Exception) -> bool:
    """DTensor could not do it, on any rank, and nothing was moved or written."""
    return isinstance(error, NotImplementedError) or failed_in_planning(error)


def _keeps_to_elements(operator: OpOverload) -> bool:
    name = schema_of(operator).name.rpartition("::")[2]
    return works_by_element(operator) or torch.Tag.pointwise in operator.tags or name.startswith(KEEP_PIECES)


def _has_empty_pieces(call: Call) -> bool:
    """Some rank holds nothing of an input."""
    for tensor in call.dtensors():
        cut_dims = [p.dim for p in tensor.placements if is_cut(p)]  # type: ignore[attr-defined]
        is_small = any(tensor.shape[dim] < tensor.device_mesh.size() ** 2 for dim in cut_dims)
        if is_small and not layout_ignoring_partial(tensor).local_numels().all():
            return True
    return False


def _fits(result: Any) -> bool:
    """This rank's pieces have the shapes of their layouts."""
    found = [x for x in tree_leaves(result) if isinstance(x, DTensor)]
    return all(tuple(own_tensor(x).shape) == _shape_of_piece(x) for x in found)


def _shape_of_piece(x: DTensor) -> tuple[int, ...]:
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(own_tensor(x).shape)
    layout = layout_ignoring_partial(x)
    return layout.local_shape(layout.rank(coordinate))


def _is_same_everywhere(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """All ranks of the mesh have the same bytes, shape and type."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(repr((tensor.shape, tensor.dtype)).encode() + content).digest()
    number = int.from_bytes(digest[:7], "little")
    return reduced(number, mesh, "min") == reduced(number, mesh, "max")
