"""Fallback to replicated tensors for operators without a sharding rule: `with replicate_fallback(): …`.

DTensor raises on operators without a sharding rule, and on plain tensors mixed with DTensors. Within this context, such
operators run on gathered inputs instead (`run_replicated`), with a warning that states the cost. The fallback works
below autograd, so it also applies to backward passes.

DTensor runs whatever it can: an operator falls back only if DTensor fails during planning, which is deterministic
across ranks. A failure during computation may be local to one rank and is raised. The exception is known in advance: if
some rank's shard is empty (a dim of size 3 sharded over 4 ranks), many operators fail on that rank and leave the others
hanging. The ranks then first agree on whether any of them failed.

Calls that DTensor 2.13 computes incorrectly, or in which it fails midway, are checked for and fall back, too. Each
check depends only on properties that are the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.gathered_views import all_reduce_int, any_rank
from meshwright.dtensor_ops.operator_context import OperatorContext, has_empty_list, has_empty_shards, operator_context
from meshwright.dtensor_ops.private import (
    OpOverload,
    as_replicated,
    draws_per_rank,
    failed_in_planning,
    has_custom_handler,
    local_tensor,
    schema_of,
    shard_dim,
    tree_leaves,
    tree_map_only,
)
from meshwright.dtensor_ops.run_replicated import (
    CONTEXT,
    OpCall,
    OperatorError,
    RunOp,
    gather_bytes,
    is_storage,
    run_replicated,
    storage_error,
    tensors_in,
)
from meshwright.dtensor_ops.shard_order_ops import is_elementwise
from meshwright.dtensor_ops.sharding_rules import register_rules
from meshwright.dtensor_ops.torch_functions import torch_functions
from meshwright.log import get_logger
from meshwright.reshard.dtensor import active_interceptor, is_mixing, mixing_refused, run_torch_function, spec_of
from meshwright.reshard.dtensor.placements import layout_ignoring_partial
from meshwright.units import format_bytes

_log = get_logger(__name__)

Warn = bool | Literal["error"]
EMPTY_SAFE_PREFIXES = ("new_", "slice", "select")
"""Name prefixes of operators that, like elementwise ones, cannot fail on an empty shard."""
BACKWARD, SAFE_BACKWARD = "_backward", ("_loss", "cross_entropy", "softmax")
"""Parts of the names of operators of which some divide by the size of a shard, which kills the process, and of those
that never do: losses are sums here."""
REFUSED_BEFORE_PLANNING = ("aten.as_strided.default",)
"""Operators that DTensor's own handlers reject before planning."""


@dataclass
class FallbackCounts:
    """Number of fallbacks within a `replicate_fallback` block, by operator name."""

    counts: dict[str, int] = field(default_factory=dict)


@contextmanager
def replicate_fallback(warn: Warn = True) -> Iterator[FallbackCounts]:
    """Run operators without a sharding rule on gathered inputs, on this thread.

    A result takes the placements of a sharded input of the same shape, or is replicated. A plain tensor mixed with
    DTensors is treated as replicated if all ranks hold the same values. Otherwise the block acts like `for_dtensor`.

    Args:
        warn: True logs a warning on each operator's first fallback, with the bytes received per rank; False logs
            nothing; "error" raises before any communication instead of gathering.

    Raises:
        OperatorError: within the block, for operators that cannot fall back, such as storage and random operators.
    """
    register_rules()
    fallback = _FallbackLayer(warn)
    context = OperatorContext(
        [fallback],
        operators=intercepted_operators(),
        on_gather=fallback.record,
        recovers=lambda error: True,  # the layer raises what it cannot recover from
        replicates_plain_tensors=warn != "error",
        run_function=fallback.run_function,
        outer=active_interceptor(),
    )
    with torch_functions(), operator_context(context):
        yield fallback.fallbacks


class _FallbackLayer:
    """Layer that runs operators on gathered inputs if DTensor cannot run them."""

    def __init__(self, warn: Warn) -> None:
        self.fallbacks = FallbackCounts()
        self._warn = warn
        self._compared: frozenset[int] = frozenset()
        """Plain tensors among the arguments of the torch functions that run."""

    def run_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function on DTensors. Plain tensors that it mixes with them are compared here: PyTorch takes the
        plans of such operators from its cache, unseen by a context, after the same ones of replicated DTensors."""
        tensors = tensors_in(args, kwargs)
        plain, before = self._plain(tensors), self._compared
        meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
        if not plain or not meshes:
            return run_torch_function(function, args, kwargs)
        try:
            with mixing_refused():
                return run_torch_function(function, args, kwargs)
        except RuntimeError as error:
            if not is_mixing(error):
                raise
        self._compare(plain, meshes[0], getattr(function, "__name__", str(function)))
        self._compared = before | {id(tensor) for tensor in plain}
        try:
            return run_torch_function(function, args, kwargs)
        finally:
            self._compared = before

    def _plain(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the plain tensors to be replicated: not scalars, which DTensor handles itself."""
        plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and tensor.numel() != 1]
        is_left = self._warn == "error" or any(tensor.layout is not torch.strided for tensor in plain)
        return [] if is_left else plain

    def _compare(self, plain: Iterable[Tensor], mesh: DeviceMesh, name: str) -> None:
        for tensor in plain:
            if id(tensor) not in self._compared and not _is_same_on_all_ranks(tensor, mesh):
                raise OperatorError(
                    f"{name} mixes DTensors and a plain tensor of shape {tuple(tensor.shape)} whose values differ "
                    "between ranks",
                    where=CONTEXT,
                    rule="a plain tensor is treated as replicated, so all ranks must have the same values",
                    fix="DTensor.from_local(x, mesh, placements), which declares how it is sharded",
                )

    def __call__(self, call: OpCall, run: RunOp) -> Any:
        """Compute `call` with `run`, or from gathered inputs if that fails."""
        call = self._replicate_plain_tensors(call)
        if is_incorrect(call):
            return self._from_copies(call)
        has_empty = any(has_empty_shards(spec_of(tensor)) for tensor in call.dtensors())
        if has_empty and not _is_safe_on_empty(call.operator):
            name = str(call.operator)
            may_divide = BACKWARD in name and not any(part in name for part in SAFE_BACKWARD)
            if may_divide or has_custom_handler(call.operator):
                return self._from_copies(call)
            return self._run_on_empty_shards(call, run)
        try:
            return run(call)
        except Exception as error:
            if not _can_fall_back(error) and str(call.operator) not in REFUSED_BEFORE_PLANNING:
                raise
        return self._from_copies(call)

    def _replicate_plain_tensors(self, call: OpCall) -> OpCall:
        """Convert plain tensors to replicated DTensors."""
        if not (plain := self._plain(call.tensors())):
            return call
        mesh = call.mesh()
        self._compare(plain, mesh, str(call.operator))
        replicated = {id(tensor): as_replicated(tensor, mesh) for tensor in plain}
        args, kwargs = tree_map_only(Tensor, lambda t: replicated.get(id(t), t), (call.args, call.kwargs))
        return OpCall(call.operator, args, kwargs)

    def _run_on_empty_shards(self, call: OpCall, run: RunOp) -> Any:
        """Return DTensor's result if it succeeded on every rank, else fall back on all ranks."""
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
        if is_storage(call.operator, call.dtensors()):
            raise storage_error(str(call.operator))
        self.record(call)
        return run_replicated(call)

    def record(self, call: OpCall) -> None:
        """Count a fallback and log a warning, or raise if `warn` is "error"."""
        name = str(call.operator)
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
        self.fallbacks.counts[name] = self.fallbacks.counts.get(name, 0) + 1


def _can_fall_back(error: Exception) -> bool:
    """Return True if DTensor failed in the same way on all ranks, before communicating or writing anything."""
    return isinstance(error, NotImplementedError) or failed_in_planning(error)


def _is_safe_on_empty(operator: OpOverload) -> bool:
    name = schema_of(operator).name.rpartition("::")[2]
    return is_elementwise(operator) or torch.Tag.pointwise in operator.tags or name.startswith(EMPTY_SAFE_PREFIXES)


def _has_expected_shapes(result: Any) -> bool:
    """Return True if this rank's shards have the shapes that their placements imply."""
    for x in tree_leaves(result):
        if isinstance(x, DTensor) and (coordinate := x.device_mesh.get_coordinate()) is not None:
            layout = layout_ignoring_partial(x)
            if tuple(local_tensor(x).shape) != layout.local_shape(layout.rank(coordinate)):
                return False
    return True


def _is_same_on_all_ranks(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Return True if the tensor has the same bytes, shape and dtype on all ranks of the mesh."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(repr((tensor.shape, tensor.dtype)).encode() + content).digest()
    checksum = int.from_bytes(digest[:7], "little")
    return all_reduce_int(checksum, mesh, "min") == all_reduce_int(checksum, mesh, "max")


aten = torch.ops.aten


def is_incorrect(call: OpCall) -> bool:
    """Return True if DTensor's result would differ from the result on one device."""
    check = CHECKS.get(str(call.operator))
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


def _convolution(call: OpCall) -> bool:
    """Check for a sharded kernel or image: DTensor treats the partial result as the full one.

    An input sharded along channels fails in the forward pass, and a partial input in the backward pass.
    """
    x, kernel, bias = call.args[:3]
    return is_sharded(x, first_dim=1) or is_sharded(kernel) or is_sharded(bias) or any(map(is_partial, call.dtensors()))


def _convolution_backward(call: OpCall) -> bool:
    gradient, x, kernel = call.args[:3]
    is_cut = is_sharded(gradient, first_dim=1) or is_sharded(x, first_dim=1) or is_sharded(kernel)
    return is_cut or any(map(is_partial, call.dtensors()))


def _has_no_elements(call: OpCall) -> bool:
    """Check for a dim of size 0, which makes DTensor's planning loop forever."""
    return bool(call.args[0].numel() == 0)


def _is_non_contiguous(call: OpCall) -> bool:
    """Check for a non-contiguous input: the forward tests the shard for contiguity, the backward the full tensor."""
    return not call.args[0].is_contiguous()


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
    # DTensor shards both inputs alike, even along a dim that one of them lacks.
    "aten.equal.default": lambda call: bool(call.args[0].shape != call.args[1].shape),
    "aten._linalg_det.default": _is_non_contiguous,
    "aten._linalg_slogdet.default": _is_non_contiguous,
    # DTensor mistakes the second dim of an unbatched input for channels.
    "aten._adaptive_avg_pool2d_backward.default": lambda call: bool(call.args[0].dim() == 3),
    "aten.native_group_norm_backward.default": lambda call: any(map(is_sharded, call.dtensors())),  # global sizes
    "aten._to_copy.default": _is_partial_to_float8,
    "aten.view.default": _has_no_elements,
    "aten._unsafe_view.default": _has_no_elements,
    "aten.reshape.default": _has_no_elements,
}
"""Checks by operator; a check returns True if DTensor computes the call incorrectly."""


PLANNED_CHECKS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
"""Operators in `CHECKS` that need not be intercepted on every call: DTensor plans each call without elements again."""
COMPLEX_SCALARS = tuple(getattr(aten, name).Scalar for name in ("mul", "div", "add", "sub", "rsub", "pow"))
"""Operators whose complex argument DTensor fails to hash before it plans anything."""


def intercepted_operators() -> list[OpOverload]:
    """Return the operators to check on every call."""
    names = [name.split(".")[1:] for name in CHECKS if name not in PLANNED_CHECKS]
    return [*(getattr(getattr(aten, packet), overload) for packet, overload in names), *COMPLEX_SCALARS]
