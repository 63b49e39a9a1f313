"""Adapter for private PyTorch APIs: interception of operators by DTensor's dispatcher.

DTensor's dispatcher is C++ that calls back into `DTensor._op_dispatcher` at a few points. It looks up a table of handlers
by operator, then a per-thread cache of plans, and only if that misses it calls `PLANNING`. Whatever `PLANNING` returns,
if it is no plan, is the operator's result. So an operator that needs no correction costs almost nothing extra within a
context, if no plan is cached that would hide a call from it: such plans are never cached, in or outside of contexts
(`_ObservedDispatcher`), from the first context of the process on.

Private PyTorch names: `DTensor._op_dispatcher`, its class `OpDispatcher` with the methods used here and its table of
handlers, `OpInfo`, `OutputSharding`, `DTensorSpec`, `_are_we_tracing`, operators' `_schema` and `return_and_correct_aliasing`.
Checked on 2.13; 2.11 has the same names.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OutputSharding
from torch.utils._python_dispatch import return_and_correct_aliasing

from meshwright.dtensor_ops.private import (
    Handler,
    OpOverload,
    clear_sharding_cache,
    draws_per_rank,
    own_handlers,
    shard_dim,
    spec_has_default_order,
    tree_leaves,
)
from meshwright.reshard.dtensor import active_hook
from meshwright.reshard.dtensor.placements import layout_of_placements

READ_METADATA = (torch.ops.aten.is_same_size.default, torch.ops.aten.is_pinned.default)
"""Operators whose DTensor handlers read only metadata, so no context needs to intercept them."""


class Interceptor(Protocol):
    """Context that runs some operators in place of DTensor."""

    replicates_plain_tensors: bool
    """True if plain tensors mixed with DTensors reach `run`, instead of an error by DTensor."""

    def handlers(self, own: dict[OpOverload, Handler]) -> Handlers:
        """Return DTensor's own table of handlers with those of the operators to run always."""

    def recovers(self, error: Exception) -> bool:
        """Return True to run a call that DTensor failed to plan."""

    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; within, DTensor runs operators by itself."""


class _ThreadState(threading.local):
    """State of one thread.

    Attributes:
        handlers: the table that DTensor's dispatcher looks up on this thread; None if it is to be found from the
            redistribution hook, as on a thread that only runs backward.
        num_running: number of interceptors that are running.
        has_clean_cache: True if all plans cached by this thread are from after the first context.
    """

    handlers: dict[OpOverload, Handler] | None = None
    num_running = 0
    has_clean_cache = False


class _Interception:
    """Reference-counted installation of the interceptors, shared by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self.thread = _ThreadState()

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
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Let the owner of this thread's redistribution hook intercept operators within the block."""
    dispatcher, thread = DTensor._op_dispatcher, _interception().thread
    before = dispatcher._allow_implicit_replication
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


def _clean_cache(thread: _ThreadState) -> None:
    """Drop the plans that this thread cached before the first context of the process."""
    if not thread.has_clean_cache:
        clear_sharding_cache()
        thread.has_clean_cache = True


def run_below(interceptor: Interceptor, run: Callable[[Any], Any], call: Any) -> Any:
    """Return `run(call)`, in which DTensor runs operators by itself."""
    thread, dispatcher, own = _interception().thread, DTensor._op_dispatcher, own_handlers()
    is_known = thread.handlers is not None
    thread.num_running += 1
    thread.handlers = own
    if interceptor.replicates_plain_tensors:
        dispatcher._allow_implicit_replication = False
    try:
        return run(call)
    finally:
        thread.num_running -= 1
        thread.handlers = own if thread.num_running else interceptor.handlers(own) if is_known else None
        if interceptor.replicates_plain_tensors and not thread.num_running:
            dispatcher._allow_implicit_replication = True


def _run_intercepted(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return active_interceptor().run(operator, args, kwargs)


class Handlers(dict[OpOverload, Handler]):
    """DTensor's table of handlers with those of an interceptor; changes, as by `loss_parallel`, go to DTensor's own."""

    def __init__(self, own: dict[OpOverload, Handler], operators: Iterable[OpOverload]) -> None:
        self._own = own
        self._operators = tuple(operators)
        super().__init__()
        self._merge()

    def refresh(self) -> Handlers:
        """Return the table, merged again if DTensor's own has changed since."""
        if self._num_own != len(self._own):
            self._merge()
        return self

    def _merge(self) -> None:
        self.clear()
        self._num_own = len(self._own)
        super().update(dict.fromkeys((*self._own, *self._operators), _run_intercepted))
        super().update({operator: self._own[operator] for operator in READ_METADATA if operator in self._own})

    def update(self, *others: Any, **more: Any) -> None:
        self._own.update(*others, **more)
        self._merge()

    def pop(self, *args: Any) -> Any:
        handler = self._own.pop(*args)
        self._merge()
        return handler

    def __setitem__(self, operator: OpOverload, handler: Handler) -> None:
        self.update({operator: handler})

    def __delitem__(self, operator: OpOverload) -> None:
        self.pop(operator)


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


class _ObservedDispatcher(OpDispatcher):
    """DTensor's dispatcher after the first context: PyTorch's own, except that it caches no plan that hides a call."""

    def _propagate_op_sharding_dispatch_slow_path(
        self, op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo, try_cache: bool
    ) -> object:
        depends = depends_on_context(op_call, args, kwargs, op_info)
        found = super()._propagate_op_sharding_dispatch_slow_path(op_call, args, kwargs, op_info, try_cache or depends)
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
    def _custom_op_handlers(self) -> dict[OpOverload, Handler]:  # type: ignore[override]
        thread = _interception().thread
        if thread.handlers is not None:
            return thread.handlers
        interceptor = active_interceptor()
        if interceptor is None:
            return own_handlers()
        _clean_cache(thread)
        handlers: dict[OpOverload, Handler] = interceptor.handlers(own_handlers())
        return handlers

    @_custom_op_handlers.setter
    def _custom_op_handlers(self, handlers: dict[OpOverload, Handler]) -> None:
        self.__dict__["_custom_op_handlers"] = handlers

    def _propagate_op_sharding_dispatch_slow_path(
        self, op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo, try_cache: bool
    ) -> object:
        interceptor = active_interceptor()
        plan = super()._propagate_op_sharding_dispatch_slow_path
        if interceptor is None or _are_we_tracing():
            return plan(op_call, args, kwargs, op_info, try_cache)
        if depends_on_context(op_call, args, kwargs, op_info):
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


def depends_on_context(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo
) -> bool:
    """Return True if a context may treat the call in another way than DTensor by itself."""
    if torch.Tag.nondeterministic_seeded in operator.tags and draws_per_rank(operator):
        return True
    assert op_info.schema is not None, "DTensor plans operators with a schema"
    specs = (*tree_leaves(op_info.schema.args_schema), *op_info.schema.kwargs_schema.values())
    if any(isinstance(x, DTensorSpec) and _is_special(x) for x in specs):
        return True
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return any(not isinstance(x, DTensor) and x.numel() != 1 for x in tensors)


def _is_special(spec: DTensorSpec) -> bool:
    return not spec_has_default_order(spec) or 0 in spec.shape or has_empty_shards(spec)


def has_empty_shards(spec: DTensorSpec) -> bool:
    """Return True if any rank's shard is empty."""
    return _has_empty_shards(spec.placements, tuple(spec.shape), tuple(spec.mesh.shape))


@lru_cache(maxsize=4096)
def _has_empty_shards(placements: tuple[Placement, ...], shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> bool:
    """Return True if any rank's shard is empty; the order of the axes does not matter."""
    sharded = tuple(p if shard_dim(p) is not None else Replicate() for p in placements)
    num_ranks = math.prod(axis_sizes)
    is_small = any(shape[dim] < num_ranks**2 for p in sharded if (dim := shard_dim(p)) is not None)
    return is_small and not layout_of_placements(sharded, None, shape, axis_sizes).local_numels().all()


def _is_gathered_view(operator: OpOverload, op_info: OpInfo, plan: OutputSharding) -> bool:
    """Return True for a view that redistributes its tensor; other plans only change the shape to view it as."""
    if not operator.is_view or not plan.needs_redistribute or plan.redistribute_schema is None:
        return False
    return bool(op_info.flat_args_schema[0] != tree_leaves(plan.redistribute_schema.args_schema)[0])


def _changes_placements(operator: OpOverload, args: tuple[Any, ...], plan: OutputSharding) -> bool:
    """Return True if an in-place operator would redistribute its tensor; 2.11 finds that out only after computing."""
    spec = plan.output_spec
    return (
        operator._schema.name.endswith("_")
        and isinstance(spec, DTensorSpec)
        and isinstance(args[0], DTensor)
        and args[0]._spec.placements != spec.placements
    )
