"""The one adapter of this room to what PyTorch has no public call for: layouts of DTensors, a hook in redistributions.

Private PyTorch names: `DTensorSpec`, `TensorMeta`, `ShardOrderEntry`, `_StridedShard`, `DTensor._spec` and
`_local_tensor`, the constructor of `DTensor`, `redistribute_local_tensor` where `_redistribute`, `_dispatch` and `_api`
of `torch.distributed.tensor` look it up, `_are_we_tracing` and `AsyncCollectiveTensor` of `_functional_collectives`,
and `_stash_obj_in_tls`, `_is_key_in_tls` and `_get_obj_in_tls` of `torch._C`. Checked on 2.11 and 2.13.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry as ShardOrderEntry
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
"""A strided cut; for those that build layouts."""


def new_dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[ShardOrderEntry, ...] | None,
    *,
    like: DTensor,
) -> DTensor:
    """A DTensor of `local` with this layout, else like another one of the same values; a leaf without a gradient."""
    return make_dtensor(local, mesh, placements, order, spec_of(like).tensor_meta, requires_grad=False)


def make_dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[ShardOrderEntry, ...] | None,
    meta: TensorMeta | None,
    *,
    requires_grad: bool,
) -> DTensor:
    """A DTensor from all that PyTorch wants to know of it."""
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


def _stash(hook: Hook | None) -> None:
    """Hand `hook` to this thread and to the backwards that it calls.

    PyTorch drops a reference when another one takes its place, on another thread too, but 2.11 takes none: without one
    of ours the memory would be freed while it is in use.
    """
    if not _takes_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(hook))
    cast(Any, torch._C)._stash_obj_in_tls(_KEY, hook)


@cache
def _takes_reference() -> bool:
    probe = object()
    before = sys.getrefcount(probe)
    cast(Any, torch._C)._stash_obj_in_tls(f"{_KEY}.probe", probe)
    taken = sys.getrefcount(probe) > before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return taken


@contextmanager
def redistributing_by(hook: Hook) -> Iterator[None]:
    """Within the block, DTensor's redistributions in this thread ask `hook` first."""
    before = _hook()
    _patch().hold()
    try:
        _stash(hook)
        yield
    finally:
        _stash(before)
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
