"""Adapter for private PyTorch APIs: DTensor's sharding propagation and operator dispatch.

Private PyTorch names: `DTensor._op_dispatcher` (its planner's tables and its random operators),
`torch._C._dispatch_get_all_op_names`, `RuntimeSchemaInfo`, `OpOverload`, `torch.utils._python_dispatch` and `_pytree`,
`DTensorSpec`, `TensorMeta`, `ShardOrderEntry`, `_StridedShard`, `_MaskPartial`, `DTensor._spec` and `_local_tensor`,
the constructor of `DTensor`, `redistribute_local_tensor`, `torch._C._is_alias_of`, `Tensor._is_view`,
`UntypedStorage._cdata`, and operators' `_schema` and `_qualified_op_name`. Checked on 2.11 and 2.13.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry, TensorMeta
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from meshwright.reshard.dtensor import PLANNING, new_dtensor, own_handlers, wait_tensor
from meshwright.reshard.dtensor import with_dim as with_dim

PLACEMENT_CHANGES = "in-place operations that require placement changes are not supported"
"""DTensor's error message for an in-place operator that would have to redistribute its tensor."""

Rule = Callable[..., Sequence[tuple[list[Placement | None], list[Placement | None]]]]
"""Function from an operator's arguments, with specs for tensors, to (output, input) placements on one axis."""


def is_shard(placement: Placement) -> bool:
    """Return True for a placement, strided or not, that shards dim `placement.dim`."""
    return isinstance(placement, Shard | _StridedShard)


def shard_dim(placement: Placement) -> int | None:
    """Return the sharded tensor dim, or None."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def has_default_order(tensor: DTensor) -> bool:
    """Return True if the axes that shard a dim do so in ascending order, as the placements imply."""
    return spec_has_default_order(tensor._spec)


def spec_has_default_order(spec: DTensorSpec) -> bool:
    """Return True if the axes that shard a dim do so in ascending order, as the placements imply."""
    default = _default_order(spec.placements)
    return default is None or spec.shard_order == default


@lru_cache(maxsize=4096)
def _default_order(placements: tuple[Placement, ...]) -> tuple[ShardOrderEntry, ...] | None:
    """Return the shard order implied by the placements, or None if strided shards define the order."""
    is_strided = any(isinstance(placement, _StridedShard) for placement in placements)
    return None if is_strided else DTensorSpec.compute_default_shard_order(placements)


def has_same_layout(a: DTensor, b: DTensor) -> bool:
    """Return True if two DTensors have the same mesh, placements and shard order."""
    x, y = a._spec, b._spec
    return x.mesh == y.mesh and x.placements == y.placements and x.shard_order == y.shard_order


def correct_aliasing(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Set up the aliasing between results and arguments that the operator's schema declares."""
    return return_and_correct_aliasing(operator, args, kwargs, result)  # type: ignore[no-untyped-call]


def masked_partial(shape: Sequence[int], dim: int) -> Placement:
    """Return the partial placement of a lookup along a sharded dim: local values are kept, others are zero."""
    return _MaskPartial(offset_shape=torch.Size(shape), offset_dim=dim)  # type: ignore[no-untyped-call]


def apply_masks(x: DTensor) -> DTensor:
    """Turn masked partial placements into plain partial sums by zeroing the masked values now.

    PyTorch applies a mask during the reduction. A mask can be used only once and belongs to the operator's plan, so a
    second use of the result fails, and so does a second call before the first result is used.
    """
    local, placements = wait_tensor(x._local_tensor), list(x.placements)
    for axis, placement in enumerate(placements):
        if isinstance(placement, _MaskPartial) and placement.mask_buffer.data is not None:
            placement.mask_buffer.apply_mask(local)  # type: ignore[no-untyped-call]
            placement.mask_buffer.release_mask()  # type: ignore[no-untyped-call]
            placements[axis] = Partial()
    if tuple(placements) == x.placements:
        return x
    return new_dtensor(local, x.device_mesh, tuple(placements), x._spec.shard_order, like=x)


def local_tensor(tensor: DTensor) -> Tensor:
    """Return the local tensor itself, not a copy: writes to it change the DTensor."""
    return tensor._local_tensor


def wrap_local(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local tensor as a leaf DTensor with this spec that does not require grad."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_alias(a: Tensor, b: Tensor) -> bool:
    return bool(cast(Any, torch._C)._is_alias_of(a, b))


def memory_key(memory: torch.UntypedStorage) -> int:
    """Return a key that is the same for all references to the memory while it is alive."""
    return int(memory._cdata)


def gather_full(tensor: DTensor) -> Tensor:
    """Gather the full tensor on this rank, bypassing autograd."""
    spec = tensor._spec
    replicated = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    return wait_tensor(_redistribute.redistribute_local_tensor(wait_tensor(tensor._local_tensor), spec, replicated))


def dtensor_like(full: Tensor, local: Tensor, like: DTensor) -> DTensor:
    """Wrap this rank's shard of `full` with the placements (replicated if partial) and shard order of `like`."""
    placements = tuple(Replicate() if p.is_partial() else p for p in like.placements)
    order = None if any(isinstance(p, _StridedShard) for p in placements) else like._spec.shard_order
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    spec = DTensorSpec(like.device_mesh, placements, meta, shard_order=order)  # type: ignore[arg-type]
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def with_meta(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], like: Tensor) -> DTensor:
    """Wrap a local tensor as a DTensor with the shape, strides and dtype of `like`."""
    return DTensor(local, DTensorSpec(mesh, placements, TensorMeta(like.shape, like.stride(), like.dtype)),
                   requires_grad=False)  # type: ignore[no-untyped-call]  # fmt: skip


def as_replicated(full: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a tensor that is the same on all ranks as a replicated DTensor."""
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, TensorMeta(full.shape, full.stride(), full.dtype))
    return DTensor(full, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def schema_of(operator: OpOverload) -> Any:
    """Return the operator's schema, a `torch._C.FunctionSchema`."""
    return operator._schema


def packet_name(packet: Any) -> str:
    """Return the unqualified name, such as `reflection_pad1d` for `aten.reflection_pad1d`."""
    name: str = packet._qualified_op_name
    return name.partition("::")[2]


def is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


@cache
def out_of_place_view(operator: OpOverload) -> OpOverload | None:
    """Return the out-of-place version of an in-place view operator, such as `aten.t` for `aten.t_`, or None."""
    name = operator._schema.name.rpartition("::")[2]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    types = [str(argument.type) for argument in operator._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        candidate: OpOverload = getattr(packet, overload)
        if candidate.is_view and [str(argument.type) for argument in candidate._schema.arguments] == types:
            return candidate
    return None


def become_view(tensor: DTensor, view: DTensor, operator: OpOverload, args: tuple[Any, ...]) -> None:
    """Give `tensor` the spec and the memory of `view`, like the in-place view operator."""
    tensor._local_tensor, tensor._spec = view._local_tensor, view._spec
    return_and_correct_aliasing(operator, args, {}, tensor)  # type: ignore[no-untyped-call]


def failed_in_planning(error: BaseException) -> bool:
    """Return True if DTensor failed in the same way on all ranks, before writing anything.

    DTensor 2.11 detects only after computing, on copies, that an in-place operator would have to change placements.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is PLANNING.__code__ for frame, _ in frames) or PLACEMENT_CHANGES in str(error)


def draws_per_rank(operator: OpOverload) -> bool:
    """Return True if DTensor runs the operator on each shard without synchronizing random number generators."""
    return operator not in DTensor._op_dispatcher._random_ops


def has_custom_handler(operator: OpOverload) -> bool:
    """Return True if DTensor has a custom handler for the operator, which may call collectives after computing."""
    return operator in own_handlers()


@cache
def inplace_views() -> tuple[OpOverload, ...]:
    """Return the in-place view operators, such as `t_`, that have an out-of-place version."""
    names = ("t_", "transpose_", "squeeze_", "unsqueeze_", "swapdims_", "swapaxes_", "detach_")
    packets = [getattr(torch.ops.aten, name) for name in names]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


@cache
def views_and_writes() -> tuple[OpOverload, ...]:
    """Return all view operators and all that write to an argument."""
    return tuple(operator for operator in _aten_operators() if operator.is_view or operator._schema.is_mutable)


def _aten_operators() -> tuple[OpOverload, ...]:
    """Return all ATen operators (a tenth of a second the first time)."""
    found = []
    for name in cast(Any, torch._C)._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet_name, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None) if namespace == "aten" else None
        operator = getattr(packet, overload or "default", None)
        if isinstance(operator, OpOverload):
            found.append(operator)
    return tuple(found)


def register_rule(operator: OpOverload, rule: Rule, *, shape_argument: int | None = None) -> None:
    """Register a sharding rule for an operator, replacing DTensor's own.

    Args:
        operator: the operator overload.
        rule: the allowed placements on each mesh axis.
        shape_argument: index of the argument with the result's shape, which must be localized for each shard.

    `register_sharding` reuses cached plans for calls that differ in arguments before the first plain int (such as a
    list of paddings), so all non-tensor arguments are added to the cache key here.
    """
    register_sharding(operator)(rule)
    keywords = [argument.name for argument in operator._schema.arguments if argument.kwarg_only]
    arguments = enumerate(operator._schema.arguments)
    first_static = next((i for i, argument in arguments if "Tensor" not in str(argument.type)), 100)
    info = RuntimeSchemaInfo(first_static, keywords or None, needs_pytree=True)
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[operator] = info
    if shape_argument is not None:
        propagator.op_to_shape_and_stride_idx[operator] = shape_argument


def clear_sharding_cache() -> None:
    """Clear DTensor's sharding cache on this thread so that new rules take effect."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
