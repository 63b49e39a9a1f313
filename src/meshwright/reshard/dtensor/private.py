"""Adapter for private PyTorch APIs: DTensor specs, and hooks into DTensor's redistributions and operator dispatch.

DTensor's operator dispatch is C++ that calls back into `DTensor._op_dispatcher` at a few points. It looks up a table of
handlers by operator, then a per-thread cache of plans, and only if that misses it calls the function that plans the
operator. Whatever that returns, if it is no plan, is the operator's result. So an operator that needs no correction
costs almost nothing extra while operators are intercepted, if no plan is cached that would hide a call from the
interceptor: such plans are never cached (`_ObservedDispatcher`), from the first interception of the process on.

Private PyTorch names: `DTensorSpec`, `TensorMeta`, `ShardOrderEntry`, `_StridedShard`, `DTensor._spec` and
`_local_tensor`, the constructor of `DTensor`, `redistribute_local_tensor` where `_redistribute`, `_dispatch` and `_api`
of `torch.distributed.tensor` look it up, `_are_we_tracing` and `AsyncCollectiveTensor` of `_functional_collectives`,
`_stash_obj_in_tls`, `_is_key_in_tls`, `_get_obj_in_tls` and `_disabled_torch_function_impl` of `torch._C`,
`DTensor._op_dispatcher`, its class `OpDispatcher` with its handlers, planning and implicit replication, `OpInfo`,
`OutputSharding`, `_clear_sharding_prop_cache`, operators' `_schema`, and `return_and_correct_aliasing`. Checked
on 2.13; 2.11 has the same names.

Interface of the objects that run operators in place of DTensor, and the parts of it that touch no private name.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, _api, _dispatch, _redistribute
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry as ShardOrderEntry
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor._op_schema import OpInfo, OutputSharding
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

StridedShard = _StridedShard
"""PyTorch's strided shard placement, re-exported for conversion to and from layouts."""


def with_dim(placement: Placement, dim: int) -> Placement:
    """Return the same shard placement for another tensor dim."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


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


def _hooked(local_tensor: Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any) -> Tensor:
    hook = active_hook()
    owner: Interceptor | None = getattr(hook, "owner", None)
    if owner is not None and is_tracing():
        owner.note_tracing()
    if hook is not None and not options.get("async_op") and _is_plain(local_tensor, current_spec, target_spec):
        moved = hook(local_tensor, current_spec, target_spec)
        if moved is not None:
            return moved
    original: Callable[..., Tensor] = _patch().original(_redistribute, "redistribute_local_tensor")
    return original(local_tensor, current_spec, target_spec, **options)


@cache
def _patch() -> Patches:
    """Return the process-wide patch of PyTorch's `redistribute_local_tensor`."""
    return Patches(lambda: [(module, "redistribute_local_tensor", _hooked) for module in _MODULES])


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
        and not is_tracing()
        and current.mesh == target.mesh
        and current.tensor_meta is not None
        and all(type(size) is int for size in current.shape)
        and current.mesh.get_coordinate() is not None
    )


DependsOnContext = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Sequence[DTensorSpec]], bool]
"""Function of a call and the specs of its DTensors."""
PLANNING = OpDispatcher._propagate_op_sharding_dispatch_slow_path
"""Function in which DTensor plans an operator, before it communicates or computes anything."""


def is_tracing() -> bool:
    return bool(_are_we_tracing())


def own_handlers() -> HandlerTable:
    """Return DTensor's own table of handlers, without those of a context."""
    handlers: HandlerTable = vars(DTensor._op_dispatcher)["_custom_op_handlers"]
    return handlers


def _depends(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo) -> bool:
    assert op_info.schema is not None, "DTensor plans operators with a schema"
    specs = (*tree_leaves(op_info.schema.args_schema), *op_info.schema.kwargs_schema.values())
    return _interception().depends_on_context(operator, args, kwargs, [x for x in specs if isinstance(x, DTensorSpec)])


class _Interception:
    """Reference-counted installation of the interceptors, shared by all threads.

    Attributes:
        depends_on_context: function that tells whether an interceptor may treat a call in another way than DTensor.
        thread: state of the current thread.
    """

    def __init__(self) -> None:
        self.depends_on_context: DependsOnContext = lambda operator, args, kwargs, specs: False
        self._lock = threading.Lock()
        self._num_users = 0
        self.thread = DispatchState()

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            DTensor._op_dispatcher.__class__ = _InterceptedDispatcher

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                DTensor._op_dispatcher.__class__ = _ObservedDispatcher


@cache
def _interception() -> _Interception:
    return _Interception()


def active_interceptor() -> Any:
    """Return the interceptor of this thread's context, or None; None too while one is running."""
    return None if _interception().thread.num_running else getattr(active_hook(), "owner", None)


@contextmanager
def intercepted(interceptor: Interceptor, depends_on_context: DependsOnContext) -> Iterator[None]:
    """Let the owner of this thread's redistribution hook, which must be `interceptor`, run operators within the block.

    Args:
        interceptor: the object that runs them.
        depends_on_context: the same function for all interceptors; plans of such calls are no longer cached.
    """
    dispatcher, thread = DTensor._op_dispatcher, _interception().thread
    before = dispatcher._allow_implicit_replication
    _interception().depends_on_context = depends_on_context
    _interception().acquire()
    try:
        _clean_cache(thread)
        dispatcher._allow_implicit_replication = interceptor.replicates_plain_tensors
        thread.handlers = interceptor.handlers(own_handlers())
        yield
    finally:
        dispatcher._allow_implicit_replication = before
        outer = active_interceptor()
        thread.handlers = None if outer is None else outer.handlers(own_handlers())
        _interception().release()


def _clean_cache(thread: DispatchState) -> None:
    """Drop the plans that this thread cached before the first context of the process."""
    if not thread.has_clean_cache:
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        thread.has_clean_cache = True


def run_below(interceptor: Interceptor, run: Callable[[Any], Any], call: Any) -> Any:
    """Return `run(call)`, in which DTensor runs operators by itself."""
    thread, dispatcher, own = _interception().thread, DTensor._op_dispatcher, own_handlers()
    is_known, allowed = thread.handlers is not None, dispatcher._allow_implicit_replication
    thread.num_running += 1
    thread.handlers = own
    if interceptor.replicates_plain_tensors:
        dispatcher._allow_implicit_replication = False
    try:
        return run(call)
    finally:
        thread.num_running -= 1
        thread.handlers = own if thread.num_running else interceptor.handlers(own) if is_known else None
        if interceptor.replicates_plain_tensors:
            dispatcher._allow_implicit_replication = allowed


class _ObservedDispatcher(OpDispatcher):
    """DTensor's dispatcher after the first context: PyTorch's own, except that it caches no plan that hides a call."""

    def _propagate_op_sharding_dispatch_slow_path(
        self, op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo, try_cache: bool
    ) -> object:
        depends = _depends(op_call, args, kwargs, op_info)
        try_cache = try_cache or depends or op_call.is_view  # the Python cache, if not the C++ one
        found = super()._propagate_op_sharding_dispatch_slow_path(op_call, args, kwargs, op_info, try_cache)
        if isinstance(found, OutputSharding) and (depends or _is_gathered_view(op_call, op_info, found)):
            return self._run_uncached(op_call, args, kwargs, op_info, found)
        return found

    def _run_uncached(
        self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo, plan: OutputSharding
    ) -> object:
        """Run a planned operator as PyTorch's C++ does, without caching the plan."""
        op_info.output_sharding = plan
        mesh = op_info.compute_mesh
        participates = mesh.get_coordinate() is not None
        local = self._dispatch_get_local_results_slow_path(operator, args, op_info)
        is_inplace = operator._schema.name.endswith("_")
        is_out = not is_inplace and "out" in operator._schema.overload_name
        if is_inplace or is_out or (plan.output_spec is None and operator is torch.ops.aten.equal.default):
            return self._dispatch_fast_path_python_tail(
                operator, args, kwargs, mesh, plan, local, participates, is_inplace, is_out
            )
        result = self.wrap(local, plan.output_spec)
        if participates and operator.is_view:
            return return_and_correct_aliasing(operator, args, kwargs, result)  # type: ignore[no-untyped-call]
        return result


class _InterceptedDispatcher(_ObservedDispatcher):
    """DTensor's dispatcher while a context is active on some thread."""

    @property
    def _custom_op_handlers(self) -> Any:
        thread = _interception().thread
        if thread.handlers is not None:
            return thread.handlers
        interceptor = active_interceptor()
        if interceptor is None:
            return own_handlers()
        _clean_cache(thread)
        handlers: HandlerTable = interceptor.handlers(own_handlers())
        return handlers

    @_custom_op_handlers.setter
    def _custom_op_handlers(self, handlers: Any) -> None:
        self.__dict__["_custom_op_handlers"] = handlers

    def _propagate_op_sharding_dispatch_slow_path(
        self, op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo, try_cache: bool
    ) -> object:
        interceptor = active_interceptor()
        plan = super()._propagate_op_sharding_dispatch_slow_path
        if interceptor is not None and is_tracing():
            interceptor.note_tracing()
            interceptor = None
        if interceptor is None:
            return plan(op_call, args, kwargs, op_info, try_cache)
        if _depends(op_call, args, kwargs, op_info):
            return interceptor.run(op_call, args, kwargs)
        try:
            found = OpDispatcher._propagate_op_sharding_dispatch_slow_path(
                self, op_call, args, kwargs, op_info, try_cache or op_call.is_view
            )
        except Exception as error:
            if not interceptor.recovers(error):
                raise
        else:
            if not isinstance(found, OutputSharding):
                return found
            if not _is_gathered_view(op_call, op_info, found) and not _changes_placements(op_call, args, found):
                return found
        return interceptor.run(op_call, args, kwargs)


def _is_gathered_view(operator: OpOverload, op_info: OpInfo, plan: OutputSharding) -> bool:
    """Return True for a view that redistributes its tensor; other plans only change the shape to view it as."""
    if not operator.is_view or not plan.needs_redistribute or plan.redistribute_schema is None:
        return False
    return bool(op_info.flat_args_schema[0] != tree_leaves(plan.redistribute_schema.args_schema)[0])


def _changes_placements(operator: OpOverload, args: tuple[Any, ...], plan: OutputSharding) -> bool:
    """Return True if an in-place operator would redistribute its tensor; 2.11 finds that out only after computing."""
    spec: Any = plan.output_spec
    if not operator._schema.name.endswith("_") or not isinstance(spec, DTensorSpec) or not isinstance(args[0], DTensor):
        return False
    return bool(args[0]._spec.placements != spec.placements)


@contextmanager
def mixing_refused() -> Iterator[None]:
    """Let DTensor refuse operators on plain tensors and DTensors within the block; `is_mixing` tells this error."""
    dispatcher = DTensor._op_dispatcher
    before, dispatcher._allow_implicit_replication = dispatcher._allow_implicit_replication, False
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def is_mixing(error: RuntimeError) -> bool:
    """Return whether DTensor refused an operator on plain tensors and DTensors."""
    return "mixed torch.Tensor and DTensor" in str(error)


def run_torch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run a torch function as for a DTensor outside of a context."""
    return torch._C._disabled_torch_function_impl(func, (), args, kwargs or {})


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function of an operator and its arguments that runs the operator in place of DTensor's planner."""
HandlerTable = dict[Any, Handler]
"""Handlers by operator."""


class Interceptor(Protocol):
    """Context that runs some operators in place of DTensor."""

    replicates_plain_tensors: bool
    """True if plain tensors mixed with DTensors reach `run`, instead of an error by DTensor."""

    def handlers(self, own: HandlerTable) -> HandlerTable:
        """Return DTensor's own table of handlers with those of the operators to run always."""

    def recovers(self, error: Exception) -> bool:
        """Return True to run a call that DTensor failed to plan."""

    def note_tracing(self) -> None:
        """Note that DTensor plans operators for `torch.compile`, which no context changes."""

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; within, DTensor runs operators by itself."""


class DispatchState(threading.local):
    """State of one thread.

    Attributes:
        handlers: the table that DTensor's dispatcher looks up on this thread; None if it is to be found from the
            redistribution hook, as on a thread that only runs backward.
        num_running: number of interceptors that are running.
        has_clean_cache: True if all plans cached by this thread are from after the first context.
    """

    handlers: HandlerTable | None = None
    num_running = 0
    has_clean_cache = False


class Patches:
    """Reference-counted replacement of attributes, shared by all threads.

    Args:
        make: function that returns the owners, names and replacements, called when the first user acquires them.
    """

    def __init__(self, make: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def original(self, owner: Any, name: str) -> Any:
        """Return what was replaced, while there are users."""
        return next(value for o, n, value in self._originals if o is owner and n == name)

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                for owner, name, value in self._make():
                    self._originals.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, value)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            while self._num_users == 0 and self._originals:
                owner, name, value = self._originals.pop()
                delattr(owner, name) if value is None else setattr(owner, name, value)
