"""Context behind `for_dtensor` and `replicate_fallback`, which intercepts the operators that need a correction.

Corrections are layers: each layer calls the next one, and the last calls DTensor. Operators that no layer changes are
not intercepted: they run through DTensor's C++ dispatch as outside of the context (see `depends_on_context`).

**Partial values.** DTensor 2.13 reads a scalar from the local partial value, so `x.sum().item()` differs between ranks;
it also fails in inference mode. `fill_` sets every partial value to the fill value, so the sum is too large by a factor
of the number of ranks. The result of a lookup in a sharded tensor can be used only once: a second use fails.

**Mean losses** of sharded inputs are a global sum divided by the global count. DTensor 2.13 averages the averages of
the shards, which is incorrect if shards have different weights, because a dim is sharded unevenly or classes are
ignored or weighted. Its gradients of elementwise mean losses divide by the shard size, so they are too large by a
factor of the number of shards. Sums have neither problem and need no extra communication.

**Slices** along a sharded dim move only the slice's rows. DTensor gathers the dim and slices the gathered copy. A
sharding rule cannot do better, since it can only name placements of the inputs. Here each rank sends the rows of the
slice that it holds to the ranks that shard the dim with it, so a rank receives the slice less its own rows, the least
that can give every rank the slice. The placements of the result are those of DTensor: replicated over the axis that
shards the dim, unchanged over the others.

Which operators are intercepted is a table by operator and, for calls that need a look at their arguments, a function.
The interception itself is in `reshard.dtensor.private`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwright.comm.alltoallv import all_to_all_into
from meshwright.comm.collectives import rank
from meshwright.dtensor_ops.gathered_views import GatheredViews, OnGather
from meshwright.dtensor_ops.private import (
    OpOverload,
    apply_masks,
    correct_aliasing,
    draws_per_rank,
    gather_full,
    has_custom_handler,
    has_default_order,
    inplace_views,
    local_tensor,
    schema_of,
    shard_dim,
    spec_has_default_order,
    tree_leaves,
    views_and_writes,
    with_dim,
    with_meta,
)
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp
from meshwright.dtensor_ops.shard_order_ops import ShardOrders
from meshwright.dtensor_ops.sharding_rules import register_rules
from meshwright.log import get_logger
from meshwright.reshard.dtensor import (
    DTensorSpec,
    Handler,
    HandlerTable,
    active_interceptor,
    intercepted,
    is_tracing,
    redistribution_hook,
    run_below,
)
from meshwright.reshard.dtensor.placements import has_layout, layout_of_placements
from meshwright.reshard.dtensor.redistribute import Redistributor

_log = get_logger(__name__)

OpLayer = Callable[[OpCall, RunOp], Any]
"""Function that computes the result of an operator call, given the next layer."""
RunFunction = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function that runs a torch function with its arguments."""


class OperatorContext:
    """Layers that run the intercepted operators of this thread.

    Args:
        layers: layers to run after the standard ones for views, losses, partial values and shard orders.
        operators: operators that these layers change, in addition to those that DTensor cannot plan.
        on_gather: callback before a write to a gathered view (see `GatheredViews`).
        recovers: function that tells whether the layers can run a call after this error in planning.
        replicates_plain_tensors: True if the layers run calls that mix plain tensors with DTensors.
        run_function: what runs torch functions on DTensors (see `torch_functions`); None leaves them to PyTorch.
        outer: the enclosing context.

    Attributes:
        views: the layer that tracks gathered views.
    """

    views: GatheredViews

    def __init__(
        self,
        layers: Sequence[OpLayer] = (),
        *,
        operators: Sequence[OpOverload] = (),
        on_gather: OnGather | None = None,
        recovers: Callable[[Exception], bool] = lambda error: False,
        replicates_plain_tensors: bool = False,
        run_function: RunFunction | None = None,
        outer: OperatorContext | None = None,
    ) -> None:
        self.mover = Redistributor(self)
        self.views = GatheredViews(self.mover, on_gather, None if outer is None else outer.views.registry)
        self.recovers = recovers
        self.replicates_plain_tensors = replicates_plain_tensors
        self.run_function = run_function
        self._operators = (*MEAN_LOSSES, *CORRECTIONS, *inplace_views(), *operators)
        self._handlers: dict[bool, Handlers] = {}
        self._run: RunOp = OpCall.run
        orders, slices = ShardOrders(self.mover), ShardedSlices(self.mover)
        all_layers: list[OpLayer] = [self.views, correct_mean_losses, correct_partial_ops, orders, slices, *layers]
        for layer in reversed(all_layers):
            self._run = partial(_run_layer, layer, self._run)

    def handlers(self, own: HandlerTable) -> Handlers:
        """Return DTensor's own handlers with those for the operators to intercept: all writes if views may need it."""
        tracks_writes = self.views.is_tracking()
        handlers = self._handlers.get(tracks_writes)
        if handlers is None:
            more = views_and_writes() if tracks_writes else ()
            handlers = self._handlers[tracks_writes] = Handlers(own, (*self._operators, *more))
        return handlers.refresh()

    def note_tracing(self) -> None:
        """Warn once a process that compiled functions run as outside of the context."""
        _warn_compiled()

    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call through the layers."""
        return run_below(self, self._run, OpCall(operator, args, kwargs))


@cache
def _warn_compiled() -> None:
    if rank() == 0:
        _log.warning(
            "torch.compile within for_dtensor or replicate_fallback: compiled functions run DTensor's operators and "
            "redistributions as outside of the context"
        )


def _run_layer(layer: OpLayer, run: RunOp, call: OpCall) -> Any:
    return layer(call, run)


@contextmanager
def operator_context(context: OperatorContext) -> Iterator[None]:
    """Run redistributions on this thread with Meshwright's plans, and operators with `context`, within the block."""
    with intercepted(context, depends_on_context), redistribution_hook(context.mover):
        yield


@contextmanager
def for_dtensor() -> Iterator[None]:
    """Plan and run DTensor's redistributions in this thread with Meshwright, within the block.

    This covers operators, `DTensor.redistribute`, `full_tensor`, and the backward pass if it runs within the block.
    PyTorch's own planner still handles placements without a layout (`_MaskPartial`), asynchronous redistributions,
    tracing, symbolic sizes, and unsupported reductions. Either all ranks of a mesh enter the block or none do.
    Operators use the rules of `sharding_rules`, which stay registered after the block, and preserve shard orders
    (`shard_order_ops`) and views (`gathered_views`). A nested block has no effect.
    """
    register_rules()
    if active_interceptor():
        yield
    else:
        with operator_context(OperatorContext()):
            yield


aten = torch.ops.aten


def correct_partial_ops(call: OpCall, run: RunOp) -> Any:
    """Compute `call` with its correction if there is one, else with `run`."""
    correct = CORRECTIONS.get(call.operator)
    return run(call) if correct is None or not isinstance(call.args[0], DTensor) else correct(call, run)


def _read_scalar(call: OpCall, run: RunOp) -> Any:
    """Read the scalar from the full tensor."""
    return call.operator(gather_full(call.args[0]))


def _fill_partial(call: OpCall, run: RunOp) -> Any:
    """Fill with the value on the first rank of each sum or product, and with the identity on the other ranks."""
    x, value = call.args
    partials = {axis: placement for axis, placement in enumerate(x.placements) if placement.is_partial()}
    coordinate = x.device_mesh.get_coordinate()
    if not partials or not has_layout(x.placements) or coordinate is None:
        return run(call)
    for axis, placement in partials.items():
        if coordinate[axis] and placement.reduce_op in IDENTITIES:
            value = IDENTITIES[placement.reduce_op]
    local_tensor(x).fill_(value)
    return x


def _unmask_lookup(call: OpCall, run: RunOp) -> Any:
    """Return the lookup's result as plain partial sums, which can be used more than once."""
    result = run(call)
    return apply_masks(result) if isinstance(result, DTensor) else result


IDENTITIES = {"sum": 0, "product": 1}
"""Identity elements by reduction; other reductions allow the same value on all ranks."""
CORRECTIONS: dict[OpOverload, Callable[[OpCall, RunOp], Any]] = {
    aten._local_scalar_dense.default: _read_scalar,
    aten.item.default: _read_scalar,
    aten.is_nonzero.default: _read_scalar,
    aten.fill_.Scalar: _fill_partial,
    aten.embedding.default: _unmask_lookup,
    aten.gather.default: _unmask_lookup,
}
"""Corrections by operator, for calls whose first argument is a DTensor."""


class LossReduction(IntEnum):
    """The `reduction` argument of ATen loss operators."""

    NONE = 0
    MEAN = 1
    SUM = 2


ELEMENTWISE_LOSSES = frozenset({
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
})  # fmt: skip
"""Elementwise losses of an input and a target."""
ELEMENTWISE_BACKWARD = frozenset({
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
})  # fmt: skip
"""Backward operators of elementwise losses: gradient, input, target."""
CLASS_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Classification losses, which also return the total weight; it makes their gradients correct."""
MEAN_LOSSES = ELEMENTWISE_LOSSES | ELEMENTWISE_BACKWARD | CLASS_LOSSES
"""All operators that this layer may change."""


def correct_mean_losses(call: OpCall, run: RunOp) -> Any:
    """Compute `call` with `run`, replacing mean losses by sums."""
    operator = call.operator
    if operator in CLASS_LOSSES:
        return _mean_class_loss(call, run)
    if operator not in MEAN_LOSSES:
        return run(call)
    if _reduction(call) is not LossReduction.MEAN or _is_replicated(call):
        return run(call)
    if operator in ELEMENTWISE_LOSSES:
        return _mean_elementwise_loss(call, run)
    gradient, *inputs = call.args
    scaled = run(OpCall(aten.div.Scalar, (gradient, _num_elements(inputs))))
    return run(_with_reduction(OpCall(operator, (scaled, *inputs), call.kwargs), LossReduction.SUM))


def _mean_elementwise_loss(call: OpCall, run: RunOp) -> Any:
    dtype = call.args[0].dtype
    if dtype is not torch.float16:
        total = run(_with_reduction(call, LossReduction.SUM))
        return run(OpCall(aten.div.Scalar, (total, _num_elements(call.args))))
    elements = run(_with_reduction(call, LossReduction.NONE))  # a sum may overflow float16
    total = run(OpCall(aten.sum.default, (elements,), {"dtype": torch.float32}))
    mean = run(OpCall(aten.div.Scalar, (total, _num_elements(call.args))))
    return run(OpCall(aten._to_copy.default, (mean,), {"dtype": dtype}))


def _mean_class_loss(call: OpCall, run: RunOp) -> Any:
    is_loss_parallel = has_custom_handler(call.operator)
    if is_loss_parallel or _reduction(call) is not LossReduction.MEAN or _is_replicated(call):
        return run(call)
    total, weight = run(_with_reduction(call, LossReduction.SUM))
    return run(OpCall(aten.div.Tensor, (total, weight))), weight


def _is_replicated(call: OpCall) -> bool:
    return all(placement.is_replicate() for tensor in call.dtensors() for placement in tensor.placements)


def _num_elements(inputs: Any) -> int:
    x, target = inputs[:2]
    return math.prod(torch.broadcast_shapes(x.shape, target.shape))  # type: ignore[no-untyped-call]


def _reduction_argument(call: OpCall) -> tuple[int, Any]:
    """Return the index of the reduction among the operator's arguments, and its default."""
    arguments = enumerate(schema_of(call.operator).arguments)
    return next((i, argument.default_value) for i, argument in arguments if argument.name == "reduction")


def _reduction(call: OpCall) -> LossReduction:
    index, default = _reduction_argument(call)
    return LossReduction(call.args[index] if index < len(call.args) else call.kwargs.get("reduction", default))


def _with_reduction(call: OpCall, reduction: LossReduction) -> OpCall:
    index, _ = _reduction_argument(call)
    if index >= len(call.args):
        return OpCall(call.operator, call.args, call.kwargs | {"reduction": int(reduction)})
    return OpCall(call.operator, (*call.args[:index], int(reduction), *call.args[index + 1 :]), call.kwargs)


SLICES = (aten.slice.Tensor, aten.select.int)


class ShardedSlices:
    """Layer that slices along a sharded dim; `mover` counts the redistributions, from which the view layer infers which
    views are gathered."""

    def __init__(self, mover: Redistributor) -> None:
        self._mover = mover

    def __call__(self, call: OpCall, run: RunOp) -> Any:
        """Compute `call` by moving the rows, if it is a slice along a dim that one axis shards, else with `run`."""
        axis = _sharding_axis(call)
        if axis is None:
            return run(call)
        self._mover.num_redistributions += 1
        return _slice_along(axis, call)


def _sharding_axis(call: OpCall) -> int | None:
    """Return the only axis that shards the sliced dim, unless the slice is the full dim or empty."""
    x = call.args[0]
    if call.operator not in SLICES or not isinstance(x, DTensor) or not x.dim():
        return None
    if any(type(p) not in (Shard, Replicate, Partial) for p in x.placements) or not has_default_order(x):
        return None
    dim = _dim(call)
    axes = [axis for axis, p in enumerate(x.placements) if getattr(p, "dim", None) == dim]
    if len(axes) != 1 or x.device_mesh.get_coordinate() is None:
        return None
    return axes[0] if 0 < len(_rows(call)) < x.shape[dim] else None


def _dim(call: OpCall) -> int:
    x, dim = call.args[0], call.args[1] if len(call.args) > 1 else 0
    return int(dim) % int(x.dim())


def _rows(call: OpCall) -> range:
    """Return the indices that the call selects."""
    size = call.args[0].shape[_dim(call)]
    if call.operator is aten.select.int:
        return range(size)[call.args[2] :][:1]
    start, end, step = (*call.args[2:], *(None,) * 3)[:3]
    return range(size)[slice(start, end, step)]


def _slice_along(axis: int, call: OpCall) -> DTensor:
    x, dim, rows = call.args[0], _dim(call), _rows(call)
    num_ranks, rank = x.device_mesh.size(axis), x.device_mesh.get_coordinate()[axis]
    chunk = math.ceil(x.shape[dim] / num_ranks)
    ends = [bisect_left(rows, each * chunk) for each in range(num_ranks + 1)]
    held = [rows[low:high] for low, high in pairwise(ends)]
    first, mine, offset = local_tensor(x).movedim(dim, 0), held[rank], rank * chunk
    own = (first[mine.start - offset : mine[-1] + 1 - offset : mine.step] if mine else first[:0]).contiguous()
    local = own.new_empty((len(rows), *own.shape[1:]))
    sent = own.repeat(num_ranks, *[1] * (own.dim() - 1))
    counts = [len(each) for each in held]
    group = x.device_mesh.get_group(axis)
    all_to_all_into(local, sent, send_splits=[len(held[rank])] * num_ranks, recv_splits=counts, group=group)
    local = local.movedim(0, dim).contiguous()
    if call.operator is aten.select.int:
        local = local.squeeze(dim)
    meta = call.operator(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *call.args[1:])
    placements = [_placement(p, dim, call) for p in x.placements]
    placements[axis] = Replicate()
    result = with_meta(local, x.device_mesh, tuple(placements), meta)
    view: DTensor = correct_aliasing(call.operator, call.args, call.kwargs, result)
    return view


def _placement(placement: Placement, dim: int, call: OpCall) -> Placement:
    """Return the result's placement over an axis that does not shard the sliced dim; `select` removes that dim."""
    sharded = shard_dim(placement)
    is_later = call.operator is aten.select.int and sharded is not None and sharded > dim
    return with_dim(placement, sharded - 1) if is_later and sharded is not None else placement


READ_METADATA = (torch.ops.aten.is_same_size.default, torch.ops.aten.is_pinned.default)
"""Operators whose DTensor handlers read only metadata, so no context needs to intercept them."""


def _run_intercepted(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = active_interceptor()
    if is_tracing():
        context.note_tracing()
        return run_below(context, lambda call: operator(*args, **kwargs), None)
    return context.run(operator, args, kwargs)


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


def depends_on_context(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[DTensorSpec]
) -> bool:
    """Return True if a context may treat the call in another way than DTensor by itself."""
    if torch.Tag.nondeterministic_seeded in operator.tags and draws_per_rank(operator):
        return True
    if any(not spec_has_default_order(spec) or 0 in spec.shape or has_empty_shards(spec) for spec in specs):
        return True
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return has_empty_list(args) or any(not isinstance(x, DTensor) and x.numel() != 1 for x in tensors)


def has_empty_list(args: tuple[Any, ...]) -> bool:
    """Return True if an argument is an empty list, which may mean that an operator reduces over all dims."""
    return any(type(value) is list and not value for value in args)


def has_empty_shards(spec: DTensorSpec) -> bool:
    """Return True if any rank's shard is empty."""
    return _has_empty_shards(spec.placements, tuple(spec.shape), tuple(spec.mesh.shape))


@lru_cache(maxsize=4096)
def _has_empty_shards(placements: tuple[Placement, ...], shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> bool:
    sharded = tuple(p if shard_dim(p) is not None else Replicate() for p in placements)
    num_ranks = math.prod(axis_sizes)
    is_small = any(shape[dim] < num_ranks**2 for p in sharded if (dim := shard_dim(p)) is not None)
    return is_small and not layout_of_placements(sharded, None, shape, axis_sizes).local_numels().all()
