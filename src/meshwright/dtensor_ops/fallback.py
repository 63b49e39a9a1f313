"""Fallback to replicated tensors for operators without a sharding rule: `with replicate_fallback(): …`.

DTensor raises for operators without a sharding rule, and for plain tensors mixed with DTensors. In this context such
an operator is computed from its gathered inputs instead (`run_replicated`), with a warning that states the cost. The
fallback works below autograd, so it applies to the backward pass of an operator as well.

Each operator of this thread is intercepted before DTensor, which is itself left unmodified. DTensor runs whatever it
can: an operator falls back only if DTensor failed during planning, which is deterministic across ranks. A failure
during computation is specific to one rank and is raised, with one exception that is known in advance: if some rank's
shard is empty (a dim of 3 sharded over 4 ranks), many operators fail on that rank and leave the others hanging. In
that case the ranks first agree on whether any of them failed.
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

from meshwright.dtensor_ops.consensus import all_reduce_int, any_rank
from meshwright.dtensor_ops.dispatch_mode import dispatch_context
from meshwright.dtensor_ops.function_mode import OpFunctionMode
from meshwright.dtensor_ops.incorrect_ops import is_incorrect
from meshwright.dtensor_ops.private import (
    OpOverload,
    as_replicated,
    failed_in_planning,
    has_custom_handler,
    is_shard,
    local_tensor,
    schema_of,
    tree_leaves,
    tree_map_only,
)
from meshwright.dtensor_ops.refused_ops import (
    OperatorError,
    is_storage,
    name_of,
    plain_tensor_error,
    storage_error,
)
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp, gather_bytes, run_replicated
from meshwright.dtensor_ops.shard_order_ops import is_elementwise
from meshwright.dtensor_ops.sharding_rules import register_rules
from meshwright.log import get_logger
from meshwright.reshard.dtensor.placements import layout_ignoring_partial
from meshwright.units import format_bytes

_log = get_logger(__name__)

Warn = bool | Literal["error"]
EMPTY_SAFE_PREFIXES = ("new_", "slice", "select")
"""Name prefixes of operators that, like elementwise ones, cannot fail on an empty shard."""
REFUSED_BEFORE_PLANNING = ("aten.as_strided.default",)
"""Operators that DTensor's own handlers refuse before planning."""


class FallbackCounts:
    """The fallbacks within one `replicate_fallback`.

    Attributes:
        counts: number of fallbacks by operator name.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}


@contextmanager
def replicate_fallback(warn: Warn = True) -> Iterator[FallbackCounts]:
    """Compute operators without a sharding rule from their gathered inputs, on this thread.

    Results take the placements of the sharded input of their shape, or are replicated. A plain tensor mixed with
    DTensors is treated as replicated if all ranks hold the same values. Otherwise the block acts as `for_dtensor`.

    Args:
        warn: True logs a warning on the first fallback of each operator, with the bytes each rank receives; False
            logs nothing; "error" raises instead of gathering, before any communication.

    Raises:
        OperatorError: within the block, for operators that cannot fall back: on storage, with random numbers, ….
    """
    register_rules()
    fallback = _FallbackLayer(warn)
    with OpFunctionMode(), dispatch_context(fallback, on_gather=fallback.record):
        yield fallback.fallbacks


class _FallbackLayer:
    """The layer that runs operators on gathered inputs if DTensor cannot run them."""

    def __init__(self, warn: Warn) -> None:
        self.fallbacks = FallbackCounts()
        self._warn = warn

    def __call__(self, call: OpCall, run: RunOp) -> Any:
        """Compute the result of `call` by `run`, or from gathered inputs if that fails."""
        call = self._replicate_plain_tensors(call)
        if is_incorrect(call):
            return self._from_copies(call)
        if _has_empty_shards(call) and not _is_safe_on_empty(call.operator):
            return (
                self._from_copies(call) if has_custom_handler(call.operator) else self._run_on_empty_shards(call, run)
            )
        try:
            return run(call)
        except Exception as error:
            if not _can_fall_back(error) and name_of(call.operator) not in REFUSED_BEFORE_PLANNING:
                raise
        return self._from_copies(call)

    def _replicate_plain_tensors(self, call: OpCall) -> OpCall:
        """Convert plain tensors to replicated DTensors, except scalars, which DTensor converts itself."""
        plain = [t for t in call.tensors() if not isinstance(t, DTensor) and t.numel() != 1]
        if not plain or self._warn == "error" or any(tensor.layout is not torch.strided for tensor in plain):
            return call
        mesh = call.mesh()
        for tensor in plain:
            if not _is_same_on_all_ranks(tensor, mesh):
                raise plain_tensor_error(call.operator, tuple(tensor.shape))
        replicated = {id(tensor): as_replicated(tensor, mesh) for tensor in plain}
        args, kwargs = tree_map_only(Tensor, lambda t: replicated.get(id(t), t), (call.args, call.kwargs))
        return OpCall(call.operator, args, kwargs)

    def _run_on_empty_shards(self, call: OpCall, run: RunOp) -> Any:
        """Return DTensor's result if no rank failed to compute its shard of it, else fall back on all ranks."""
        result, failed = None, None
        written = [local_tensor(tensor) for tensor in call.written_tensors() if isinstance(tensor, DTensor)]
        before = [tensor.clone() for tensor in written]
        try:
            result = run(call)
        except Exception as error:
            if _can_fall_back(error):
                return self._from_copies(call)
            failed = error
        if not any_rank(failed is not None or not _has_expected_shapes(result), call.mesh()):
            return result
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
        return self._from_copies(call)

    def _from_copies(self, call: OpCall) -> Any:
        name = name_of(call.operator)
        if is_storage(call.operator, call.dtensors()):
            raise storage_error(name)
        self.record(call)
        return run_replicated(call)

    def record(self, call: OpCall) -> None:
        """Warn about a fallback and count it, or raise if `warn` is "error"."""
        name = name_of(call.operator)
        self._warn_or_raise(name, call)
        self.fallbacks.counts[name] = self.fallbacks.counts.get(name, 0) + 1

    def _warn_or_raise(self, name: str, call: OpCall) -> None:
        inputs = {id(tensor): tensor for tensor in call.dtensors()}.values()
        cost = format_bytes(sum(gather_bytes(tensor) for tensor in inputs))
        if self._warn == "error":
            layouts = ", ".join(f"{tuple(tensor.shape)} {tensor.placements}" for tensor in inputs)
            raise OperatorError(
                f"{name} has no correct sharding rule for {layouts}; each call would gather {cost} on each rank",
                where='replicate_fallback(warn="error")',
                rule="every operator needs a sharding rule for the placements of its inputs",
                fix="register one with torch.distributed.tensor.experimental.register_sharding, redistribute the "
                "inputs first, or use replicate_fallback(warn=True)",
            )
        if self._warn and name not in self.fallbacks.counts and not any(call.mesh().get_coordinate() or [0]):
            _log.warning("%s has no correct sharding rule here: gathering its inputs, %s per rank per call", name, cost)


def _can_fall_back(error: Exception) -> bool:
    """Return True if DTensor failed on all ranks alike, before communicating or writing anything."""
    return isinstance(error, NotImplementedError) or failed_in_planning(error)


def _is_safe_on_empty(operator: OpOverload) -> bool:
    name = schema_of(operator).name.rpartition("::")[2]
    return is_elementwise(operator) or torch.Tag.pointwise in operator.tags or name.startswith(EMPTY_SAFE_PREFIXES)


def _has_empty_shards(call: OpCall) -> bool:
    """Return True if some rank's shard of an input is empty."""
    for tensor in call.dtensors():
        shard_dims = [p.dim for p in tensor.placements if is_shard(p)]  # type: ignore[attr-defined]
        is_small = any(tensor.shape[dim] < tensor.device_mesh.size() ** 2 for dim in shard_dims)
        if is_small and not layout_ignoring_partial(tensor).local_numels().all():
            return True
    return False


def _has_expected_shapes(result: Any) -> bool:
    """Return True if this rank's shards have the shapes that their placements imply."""
    dtensors = [x for x in tree_leaves(result) if isinstance(x, DTensor)]
    return all(tuple(local_tensor(x).shape) == _expected_local_shape(x) for x in dtensors)


def _expected_local_shape(x: DTensor) -> tuple[int, ...]:
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(local_tensor(x).shape)
    layout = layout_ignoring_partial(x)
    return layout.local_shape(layout.rank(coordinate))


def _is_same_on_all_ranks(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Return True if all ranks of the mesh have the same bytes, shape and dtype."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(repr((tensor.shape, tensor.dtype)).encode() + content).digest()
    checksum = int.from_bytes(digest[:7], "little")
    return all_reduce_int(checksum, mesh, "min") == all_reduce_int(checksum, mesh, "max")
