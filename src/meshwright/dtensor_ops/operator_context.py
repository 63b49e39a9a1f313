"""Context behind `for_dtensor` and `replicate_fallback`, which intercepts the operators that need a correction.

Corrections are layers: each layer calls the next one, and the last calls DTensor. Operators that no layer changes are
not intercepted: they run through DTensor's C++ dispatch as outside of the context (see `interception`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from meshwright.comm.collectives import rank
from meshwright.dtensor_ops.gathered_views import GatheredViews, OnGather
from meshwright.dtensor_ops.interception import Handlers, depends_on_context
from meshwright.dtensor_ops.mean_losses import MEAN_LOSSES, correct_mean_losses
from meshwright.dtensor_ops.partial_ops import CORRECTIONS, correct_partial_ops
from meshwright.dtensor_ops.private import OpOverload, inplace_views, views_and_writes
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp
from meshwright.dtensor_ops.shard_order_ops import ShardOrders
from meshwright.dtensor_ops.sharded_slices import ShardedSlices
from meshwright.dtensor_ops.sharding_rules import register_rules
from meshwright.log import get_logger
from meshwright.reshard.dtensor import HandlerTable, active_interceptor, intercepted, redistribution_hook, run_below
from meshwright.reshard.dtensor.redistribute_local import Redistributor

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
