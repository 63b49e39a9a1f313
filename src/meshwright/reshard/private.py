"""What PyTorch has no public call for: a DTensor's layout in its own words, and where an operator failed.

Private PyTorch names are used here and nowhere else in this room. For operators: `DTensor._spec`,
`DTensor._local_tensor` and `DTensor._op_dispatcher` (its planner's tables, its handlers, and the operators it draws
random numbers for), `DTensorSpec`, `TensorMeta`, `RuntimeSchemaInfo`, `_StridedShard`, `_MaskPartial`, `OpOverload`,
dispatch modes and trees of `torch.utils`, and the name of the function in which DTensor plans an operator. Written
for 2.11 to 2.13; checked on 2.13.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, return_and_correct_aliasing

from meshwright.mesh.layout import Layout

tree_flatten, tree_leaves, tree_map_only = _pytree.tree_flatten, _pytree.tree_leaves, _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten

PLANNING = "_propagate_op_sharding_dispatch_slow_path"
"""The function in which DTensor chooses an operator's layouts: before it moves or computes anything."""

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
    strided = any(isinstance(placement, _StridedShard) for placement in tensor.placements)
    default = DTensorSpec.compute_default_shard_order(tensor.placements)
    return strided or tensor._spec.shard_order == default


def masked_partial(shape: Sequence[int], dim: int) -> Placement:
    """Partial sums of what was looked up along a dim that is cut: each rank has what it holds, and zero elsewhere."""
    return _MaskPartial(offset_shape=torch.Size(shape), offset_dim=dim)  # type: ignore[no-untyped-call]


def layout_of(tensor: DTensor) -> Layout:
    """How the tensor lies on its mesh."""
    words, orders = [], {}
    for placement in tensor.placements:
        if isinstance(placement, _StridedShard):
            words.append(f"SS{placement.dim}/{placement.split_factor}")
        elif isinstance(placement, Shard):
            words.append(f"S{placement.dim}")
        elif isinstance(placement, Partial):
            words.append(f"P({placement.reduce_op})")
        else:
            words.append("R")
    if not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        orders = {entry.tensor_dim: list(entry.mesh_dims) for entry in tensor._spec.shard_order}
    return Layout.parse(" ".join(words), tuple(tensor.device_mesh.shape), tuple(tensor.shape), orders)


def own_tensor(tensor: DTensor) -> Tensor:
    """This rank's tensor itself: writing to it writes to the DTensor."""
    return tensor._local_tensor


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


def turn_in_place(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Run an operator that changes the shape of its first argument in place, a tensor that every rank has whole."""
    tensor: DTensor = args[0]
    local = tensor._local_tensor
    operator(local, *args[1:], **kwargs)
    tensor._spec = DTensorSpec(
        tensor.device_mesh, tensor.placements, TensorMeta(local.shape, local.stride(), local.dtype)
    )
    return_and_correct_aliasing(operator, args, kwargs, tensor)  # type: ignore[no-untyped-call]
    return tensor


def failed_in_planning(error: BaseException) -> bool:
    """DTensor failed before it moved or computed anything, for reasons that are the same on all ranks."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == PLANNING for frame, _ in frames)


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
