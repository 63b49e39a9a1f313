"""What PyTorch has no public call for: DTensors' layouts, a way into their redistributions, operators that failed.

Private PyTorch names are used here and nowhere else in this room. For layouts and redistributions: `DTensorSpec`,
`TensorMeta`, `ShardOrderEntry`, `_StridedShard`, `_MaskPartial`, `DTensor._spec` and `_local_tensor`, the constructor
of `DTensor`, `redistribute_local_tensor` where `_redistribute`, `_dispatch` and `_api` of `torch.distributed.tensor`
look it up, `_are_we_tracing` and `AsyncCollectiveTensor` of `_functional_collectives`, and `_stash_obj_in_tls`,
`_is_key_in_tls` and `_get_obj_in_tls` of `torch._C`. For operators: `DTensor._op_dispatcher` (its planner's tables, its
handlers, and the operators it draws random numbers for), `RuntimeSchemaInfo`, `OpOverload`,
`torch.utils._python_dispatch`, and the name of the function in which DTensor plans an operator. Checked on 2.13.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, return_and_correct_aliasing

from meshwright.errors import LayoutError
from meshwright.mesh.intervals import Split
from meshwright.mesh.layout import Layout, Reduction

ShardOrder = Mapping[int, Sequence[int]] | Iterable[tuple[int, Sequence[int]]]
"""For tensor dims, the mesh axes that cut them in the order of the cuts."""

_REDUCTIONS = frozenset(Reduction)


def layout_of_spec(spec: DTensorSpec) -> Layout:
    """How a DTensor with this spec lies.

    Raises:
        LayoutError: it has a placement that no layout says.
    """
    order = None if spec.shard_order is None else tuple((dim, tuple(axes)) for dim, axes in spec.shard_order)
    return layout_of_placements(spec.placements, order, tuple(spec.shape), tuple(spec.mesh.shape))


def cuts_of(tensor: DTensor) -> Layout:
    """Which part of the tensor each rank has; partial values count as copies."""
    placements = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
    order = tensor._spec.shard_order
    pairs = None if order is None else tuple((dim, tuple(axes)) for dim, axes in order)
    return layout_of_placements(placements, pairs, tuple(tensor.shape), tuple(tensor.device_mesh.shape))


@lru_cache(maxsize=4096)
def layout_of_placements(
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    shape: tuple[int, ...],
    axis_sizes: tuple[int, ...],
) -> Layout:
    """The layout of these placements, cut by cut from the first axis to the last, or in the order given.

    Raises:
        LayoutError: a placement that no layout says, or that does not fit the tensor.
    """
    splits: dict[int, Split] = {}
    partial: list[Reduction | None] = [None] * len(placements)
    dims: list[list[int]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        if type(placement) in (Shard, _StridedShard):
            dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim  # type: ignore[attr-defined]
            if not 0 <= dim < len(shape):
                raise _refused(placement, axis, f"the tensor has {len(shape)} dims", "a dim of the tensor")
            parts = placement.split_factor if isinstance(placement, _StridedShard) else 1
            splits[axis] = Split(axis, int(parts))
            dims[dim].append(axis)
        elif type(placement) is Partial and placement.reduce_op in _REDUCTIONS:
            partial[axis] = Reduction(placement.reduce_op)
        elif type(placement) is not Replicate:
            rule = "Replicate, Shard and _StridedShard, and Partial of sum, avg, max, min and product have a layout"
            raise _refused(placement, axis, rule, "PyTorch's DTensor.redistribute to one of these first")
    for dim, axes in order or ():
        cutting = dims[dim] if 0 <= dim < len(dims) else []
        if sorted(axes) != cutting:
            raise LayoutError(
                f"shard_order cuts dim {dim} over axes {list(axes)}, the placements over axes {cutting}",
                where="shard_order",
                rule="the order names each axis that cuts the dim once",
                fix=f"shard_order={{{dim}: {cutting}}}" if cutting else "no order for a dim that is not cut",
            )
        dims[dim] = list(axes)
    return Layout(shape, axis_sizes, tuple(tuple(splits[axis] for axis in axes) for axes in dims), tuple(partial))


def has_layout(placements: Sequence[Placement]) -> bool:
    """Each of these placements is one that a layout says."""
    return all(
        type(placement) in (Shard, _StridedShard, Replicate)
        or (type(placement) is Partial and placement.reduce_op in _REDUCTIONS)
        for placement in placements
    )


def _refused(placement: Placement, axis: int, rule: str, fix: str) -> LayoutError:
    return LayoutError(f"{placement!r} on mesh axis {axis} has no layout", where="placements", rule=rule, fix=fix)


def placements_of(layout: Layout) -> tuple[tuple[Placement, ...], tuple[ShardOrderEntry, ...] | None]:
    """A layout as DTensor's placements and, where cuts are not in the order of the axes, its shard order."""
    placements: list[Placement] = [Partial(str(r)) if r else Replicate() for r in layout.partial]
    order, is_default = [], True
    for dim, splits in enumerate(layout.splits):
        for split in splits:
            strided = split.parts > 1
            placements[split.axis] = _StridedShard(dim, split_factor=split.parts) if strided else Shard(dim)
        axes = layout.axes_of(dim)
        is_default = is_default and axes == tuple(sorted(axes))
        if axes:
            order.append(ShardOrderEntry(dim, axes))
    return tuple(placements), None if is_default else tuple(order)


def new_dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[ShardOrderEntry, ...] | None,
    *,
    like: DTensor,
) -> DTensor:
    """A DTensor of `local` with this layout, else like another one of the same values."""
    return _dtensor(local, mesh, placements, order, spec_of(like).tensor_meta, requires_grad=like.requires_grad)


def dtensor_of(local: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A DTensor whose parts are `local`, of a contiguous tensor that lies as `layout` says."""
    stride = torch.empty(layout.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(layout.shape), stride, local.dtype)
    return _dtensor(local, mesh, *placements_of(layout), meta, requires_grad=local.requires_grad)


def _dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[ShardOrderEntry, ...] | None,
    meta: TensorMeta | None,
    *,
    requires_grad: bool,
) -> DTensor:
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    spec = DTensorSpec(
        mesh,
        placements,
        tensor_meta=meta,
        shard_order=order,  # type: ignore[arg-type]
        use_strided_shard_as_shard_order=strided and order is None,
    )
    return cast(DTensor, cast(Any, DTensor)(local, spec, requires_grad=requires_grad))


def spec_of(x: DTensor) -> DTensorSpec:
    """How PyTorch says that it lies."""
    return x._spec


def local_of(x: DTensor) -> Tensor:
    """This rank's part, without a step of autograd; waited for, if it is still on its way."""
    return waited(x._local_tensor)


def waited(local: Tensor) -> Tensor:
    """A tensor that a collective under way fills, once it is there."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def whole_order(order: ShardOrder | None, placements: Sequence[Placement]) -> tuple[ShardOrderEntry, ...] | None:
    """A shard order as DTensor wants it: an entry for every dim that is cut, ascending. None if it is the default.

    Raises:
        LayoutError: it names a dim twice.
    """
    if order is None:
        return None
    pairs = [(dim, tuple(axes)) for dim, axes in (order.items() if isinstance(order, Mapping) else order)]
    given = dict(pairs)
    if len(given) != len(pairs):
        raise LayoutError(
            f"shard_order {pairs} names a dim twice", where="shard_order", rule="one entry a dim", fix="one entry a dim"
        )
    axes_of: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            axes_of[placement.dim] = (*axes_of.get(placement.dim, ()), axis)
    if all(axes == axes_of.get(dim, ()) for dim, axes in given.items()):
        return None
    return tuple(ShardOrderEntry(dim, tuple(given.get(dim, axes_of.get(dim, ())))) for dim in sorted(axes_of | given))


def normal_placements(placements: Sequence[Placement], num_dims: int) -> tuple[Placement, ...]:
    """Placements with dims counted from 0."""

    def normal(placement: Placement) -> Placement:
        if isinstance(placement, _StridedShard) and placement.dim < 0:
            return _StridedShard(placement.dim + num_dims, split_factor=placement.split_factor)
        if isinstance(placement, Shard) and placement.dim < 0:
            return Shard(placement.dim + num_dims)
        return placement

    return tuple(normal(placement) for placement in placements)


Hook = Callable[[Tensor, DTensorSpec, DTensorSpec], Tensor | None]
"""Redistributes a local tensor from one spec to another; None if it leaves that to PyTorch."""

_MODULES = (_redistribute, _dispatch, _api)
"""Where PyTorch looks up `redistribute_local_tensor`: in `DTensor.redistribute`, in operators, and in conversions."""

_KEY = "meshwright.reshard.hook"


class _Patch:
    """PyTorch's function in place of which ours stands while any thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._theirs = _redistribute.redistribute_local_tensor

    def hold(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._theirs = _redistribute.redistribute_local_tensor
                self._set(self._ours)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set(self._theirs)

    def _set(self, function: Callable[..., Tensor]) -> None:
        for module in _MODULES:
            module.redistribute_local_tensor = function  # type: ignore[attr-defined]

    def _ours(
        self, local_tensor: Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> Tensor:
        hook = _hook()
        if hook is not None and not options.get("async_op") and _is_plain(local_tensor, current_spec, target_spec):
            moved = hook(local_tensor, current_spec, target_spec)
            if moved is not None:
                return moved
        return self._theirs(local_tensor, current_spec, target_spec, **options)


@cache
def _patch() -> _Patch:
    """The process's one: modules belong to the process."""
    return _Patch()


def _hook() -> Hook | None:
    """This thread's, or in a backward that of the thread that called it: autograd hands it to its own threads."""
    c = cast(Any, torch._C)
    return c._get_obj_in_tls(_KEY) if c._is_key_in_tls(_KEY) else None


@contextmanager
def redistributing_by(hook: Hook) -> Iterator[None]:
    """Within the block, DTensor's redistributions in this thread ask `hook` first."""
    before = _hook()
    _patch().hold()
    try:
        cast(Any, torch._C)._stash_obj_in_tls(_KEY, hook)
        yield
    finally:
        cast(Any, torch._C)._stash_obj_in_tls(_KEY, before)
        _patch().release()


def _is_plain(local: Tensor, current: DTensorSpec, target: DTensorSpec) -> bool:
    """An ordinary tensor of known size on one mesh, outside of tracing."""
    return (
        type(local) in (Tensor, torch.nn.Parameter, AsyncCollectiveTensor)
        and not _are_we_tracing()
        and current.mesh == target.mesh
        and current.tensor_meta is not None
        and all(type(size) is int for size in current.shape)
        and current.mesh.get_coordinate() is not None
    )


PLANNING = "_propagate_op_sharding_dispatch_slow_path"
"""The function in which DTensor chooses an operator's layouts: before it moves or computes anything."""

Rule = Callable[..., Sequence[tuple[list[Placement | None], list[Placement | None]]]]
"""From an operator's arguments, tensors as their specs, to (outputs' placements, inputs' placements) on one axis."""


def is_cut(placement: Placement) -> bool:
    """It divides a tensor dim; the dim is `placement.dim`."""
    return isinstance(placement, Shard | _StridedShard)


def masked_partial(shape: Sequence[int], dim: int) -> Placement:
    """Partial sums of what was looked up along a dim that is cut: each rank has what it holds, and zero elsewhere."""
    return _MaskPartial(offset_shape=torch.Size(shape), offset_dim=dim)  # type: ignore[no-untyped-call]


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
