"""Adapter for private PyTorch APIs: DTensor specs, and a hook into DTensor's redistributions.

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
"""PyTorch's strided shard placement, re-exported for conversion to and from layouts."""


def new_dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[ShardOrderEntry, ...] | None,
    *,
    like: DTensor,
) -> DTensor:
    """Return a leaf DTensor that does not require grad, with the global shape, strides and dtype of `like`."""
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
    """Construct a DTensor from its local tensor, placements, shard order and tensor metadata."""
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
    """Return the DTensor's spec."""
    return x._spec


def local_of(x: DTensor) -> Tensor:
    """Return the local tensor, detached from autograd, after waiting for any pending collective."""
    return wait_tensor(x._local_tensor)


def wait_tensor(local: Tensor) -> Tensor:
    """Wait for any asynchronous collective that writes the tensor, and return the tensor."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


Hook = Callable[[Tensor, DTensorSpec, DTensorSpec], Tensor | None]
"""Function that redistributes a local tensor from one spec to another, or returns None to leave it to PyTorch."""

_MODULES = (_redistribute, _dispatch, _api)
"""Modules that look up `redistribute_local_tensor` for `DTensor.redistribute`, operators and conversions."""

_KEY = "meshwright.reshard.hook"


class _Patch:
    """Reference-counted patch of PyTorch's `redistribute_local_tensor`, shared by all threads that use a hook."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._original = _redistribute.redistribute_local_tensor

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._original = _redistribute.redistribute_local_tensor
                self._set(self._hooked)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._set(self._original)

    def _set(self, function: Callable[..., Tensor]) -> None:
        for module in _MODULES:
            module.redistribute_local_tensor = function  # type: ignore[attr-defined]

    def _hooked(
        self, local_tensor: Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> Tensor:
        hook = active_hook()
        if hook is not None and not options.get("async_op") and _is_plain(local_tensor, current_spec, target_spec):
            moved = hook(local_tensor, current_spec, target_spec)
            if moved is not None:
                return moved
        return self._original(local_tensor, current_spec, target_spec, **options)


@cache
def _patch() -> _Patch:
    """Return the process-wide patch."""
    return _Patch()


def active_hook() -> Hook | None:
    """Return this thread's hook; autograd propagates it to backward threads."""
    c = cast(Any, torch._C)
    return c._get_obj_in_tls(_KEY) if c._is_key_in_tls(_KEY) else None


def _stash(hook: Hook | None) -> None:
    """Set the hook for this thread and for the backward passes it starts.

    PyTorch drops a reference whenever the value is replaced, on other threads too, but 2.11 never takes one. Without
    the extra reference the hook would be freed while in use.
    """
    if not _stash_takes_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(hook))
    cast(Any, torch._C)._stash_obj_in_tls(_KEY, hook)


@cache
def _stash_takes_reference() -> bool:
    probe = object()
    before = sys.getrefcount(probe)
    cast(Any, torch._C)._stash_obj_in_tls(f"{_KEY}.probe", probe)
    taken = sys.getrefcount(probe) > before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return taken


@contextmanager
def redistribution_hook(hook: Hook) -> Iterator[None]:
    """Let `hook` handle DTensor's redistributions in this thread within the `with` block."""
    before = active_hook()
    _patch().acquire()
    try:
        _stash(hook)
        yield
    finally:
        _stash(before)
        _patch().release()


def _is_plain(local: Tensor, current: DTensorSpec, target: DTensorSpec) -> bool:
    """Return whether `local` is a plain tensor of static size, both specs share a mesh, and nothing is being traced."""
    return (
        type(local) in (Tensor, torch.nn.Parameter, AsyncCollectiveTensor)
        and not _are_we_tracing()
        and current.mesh == target.mesh
        and current.tensor_meta is not None
        and all(type(size) is int for size in current.shape)
        and current.mesh.get_coordinate() is not None
    )
