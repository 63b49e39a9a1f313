"""The one adapter of this room to what PyTorch has no public call for: how DTensor plans and dispatches operators.

Private PyTorch names: `DTensor._op_dispatcher` (its planner's tables, its handlers, and the operators it draws random
numbers for), `RuntimeSchemaInfo`, `OpOverload`, `torch.utils._python_dispatch` and `_pytree`, `DTensorSpec`,
`TensorMeta`, `ShardOrderEntry`, `_StridedShard`, `_MaskPartial`, `DTensor._spec` and `_local_tensor`, the constructor
of `DTensor`, `redistribute_local_tensor`, `torch._C._is_alias_of`, `Tensor._is_view`, operators' `_schema` and
`_qualified_op_name`, and the name of the function in which DTensor plans
an operator. Checked on 2.11 and 2.13.
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
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from meshwright.reshard.dtensor import new_dtensor, wait_tensor

PLANNING = "_propagate_op_sharding_dispatch_slow_path"
"""The function in which DTensor chooses an operator's layouts: before it moves or computes anything."""

PLACEMENT_CHANGES = "in-place operations that require placement changes are not supported"
"""What DTensor says of an operator in place on a tensor that would have to be moved."""

Rule = Callable[..., Sequence[tuple[list[Placement | None], list[Placement | None]]]]
"""From an operator's arguments, tensors as their specs, to (outputs' placements, inputs' placements) on one axis."""


def is_cut(placement: Placement) -> bool:
    """It divides a tensor dim; the dim is `placement.dim`."""
    return isinstance(placement, Shard | _StridedShard)


def cut_dim(placement: Placement) -> int | None:
    """The tensor dim that it divides."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def moved_to(placement: Placement, dim: int) -> Placement:
    """The same way of cutting, for another tensor dim."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def cut_in_order(tensor: DTensor) -> bool:
    """Its placements say all: where several axes cut one dim, they do so from the first to the last."""
    default = _default_order(tensor._spec.placements)
    return default is None or tensor._spec.shard_order == default


@lru_cache(maxsize=4096)
def _default_order(placements: tuple[Placement, ...]) -> tuple[ShardOrderEntry, ...] | None:
    """What no order means for these; None where strided cuts say it all."""
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    return None if strided else DTensorSpec.compute_default_shard_order(placements)


def same_layout(a: DTensor, b: DTensor) -> bool:
    """On one mesh, with the same placements and order of cuts."""
    one, other = a._spec, b._spec
    return one.mesh == other.mesh and one.placements == other.placements and one.shard_order == other.shard_order


def correct_aliasing(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Tell autograd which results share memory with which arguments, as the operator's schema says."""
    return return_and_correct_aliasing(operator, args, kwargs, result)  # type: ignore[no-untyped-call]


def masked_partial(shape: Sequence[int], dim: int) -> Placement:
    """Partial sums of what was looked up along a dim that is cut: each rank has what it holds, and zero elsewhere."""
    return _MaskPartial(offset_shape=torch.Size(shape), offset_dim=dim)  # type: ignore[no-untyped-call]


def without_masks(x: DTensor) -> DTensor:
    """Parts of a sum, zero where this rank looked nothing up, in place of what PyTorch masks when it is added up.

    A mask can be used once, and belongs to the operator's plan: a second use of the result fails, and so does a second
    call before the first result was used.
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


def own_tensor(tensor: DTensor) -> Tensor:
    """This rank's tensor itself: writing to it writes to the DTensor."""
    return tensor._local_tensor


def dtensor_of(local: Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of this rank's tensor that PyTorch describes so; a leaf without a gradient."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_alias(a: Tensor, b: Tensor) -> bool:
    """They share memory."""
    return bool(cast(Any, torch._C)._is_alias_of(a, b))


def gathered(tensor: DTensor) -> Tensor:
    """The whole tensor on this rank, without a step of autograd."""
    spec = tensor._spec
    whole = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    return wait_tensor(_redistribute.redistribute_local_tensor(wait_tensor(tensor._local_tensor), spec, whole))


def as_dtensor_like(whole: Tensor, local: Tensor, like: DTensor) -> DTensor:
    """The DTensor of this rank's piece of `whole`, cut as `like`, order of cuts included; never partial."""
    placements = tuple(Replicate() if p.is_partial() else p for p in like.placements)
    order = None if any(isinstance(p, _StridedShard) for p in placements) else like._spec.shard_order
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(like.device_mesh, placements, meta, shard_order=order)  # type: ignore[arg-type]
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def as_copies(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank has whole."""
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, TensorMeta(whole.shape, whole.stride(), whole.dtype))
    return DTensor(whole, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def schema_of(operator: OpOverload) -> Any:
    """Its arguments and results: `torch._C.FunctionSchema`."""
    return operator._schema


def packet_name(packet: Any) -> str:
    """`reflection_pad1d` for `aten.reflection_pad1d`."""
    name: str = packet._qualified_op_name
    return name.partition("::")[2]


def is_view(tensor: Tensor) -> bool:
    """Autograd knows it as a view of another tensor."""
    return tensor._is_view()


@cache
def out_of_place(operator: OpOverload) -> OpOverload | None:
    """The view that an operator turns its tensor into, in place: `aten.t` for `aten.t_`; None if it does not."""
    name = operator._schema.name.rpartition("::")[2]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    types = [str(argument.type) for argument in operator._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        found: OpOverload = getattr(packet, overload)
        if found.is_view and [str(argument.type) for argument in found._schema.arguments] == types:
            return found
    return None


def turn_into(tensor: DTensor, turned: DTensor, operator: OpOverload, args: tuple[Any, ...]) -> None:
    """Give `tensor` the layout and the memory of `turned`: what `operator` does to it in place."""
    tensor._local_tensor, tensor._spec = turned._local_tensor, turned._spec
    return_and_correct_aliasing(operator, args, {}, tensor)  # type: ignore[no-untyped-call]


def failed_in_planning(error: BaseException) -> bool:
    """DTensor failed before it wrote anything, for reasons that are the same on all ranks.

    2.11 sees only when it has computed, on copies, that an operator in place would have to change placements.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == PLANNING for frame, _ in frames) or PLACEMENT_CHANGES in str(error)


def draws_by_itself(operator: OpOverload) -> bool:
    """DTensor runs it on each rank's piece without seeing to it that ranks draw what one device would."""
    return operator not in DTensor._op_dispatcher._random_ops


def has_handler(operator: OpOverload) -> bool:
    """DTensor runs it by code of its own, which may call collectives after it computed."""
    return operator in DTensor._op_dispatcher._custom_op_handlers


def active_modes() -> list[TorchDispatchMode]:
    """This thread's dispatch modes, the innermost last."""
    return _get_current_dispatch_mode_stack()


def register(operator: OpOverload, rule: Rule, *, shape_argument: int | None = None) -> None:
    """Give DTensor a rule for an operator, in place of what it has.

    Args:
        operator: of one overload.
        rule: what each axis may do.
        shape_argument: place of the argument that is the result's shape, which each rank needs for its piece.

    `register_sharding` lets plans be reused for calls that differ in arguments before the first plain int (a list
    of paddings, say), so all that is not a tensor is made part of the question here.
    """
    register_sharding(operator)(rule)
    keywords = [argument.name for argument in operator._schema.arguments if argument.kwarg_only]
    first = next((place for place, one in enumerate(operator._schema.arguments) if not _is_tensor(one)), 100)
    info = RuntimeSchemaInfo(first, keywords or None, needs_pytree=True)
    planner = DTensor._op_dispatcher.sharding_propagator
    planner.op_to_schema_info[operator] = info
    if shape_argument is not None:
        planner.op_to_shape_and_stride_idx[operator] = shape_argument


def forget_plans() -> None:
    """Drop the plans of operators that DTensor made on this thread: new rules hold from the next call on."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)
