"""Dispatch mode behind `for_dtensor` and `replicate_fallback`, which intercepts operators before DTensor.

Corrections are layers: each layer calls the next one, and the last calls DTensor. A separate mode per correction
would add about as much overhead to each operator as DTensor's own dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.gathered_views import GatheredViews, OnGather
from meshwright.dtensor_ops.mean_losses import correct_mean_losses
from meshwright.dtensor_ops.partial_ops import correct_partial_ops
from meshwright.dtensor_ops.private import OpOverload, TorchDispatchMode, active_modes
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp
from meshwright.dtensor_ops.shard_order_ops import ShardOrders
from meshwright.dtensor_ops.sharding_rules import register_rules
from meshwright.reshard.dtensor import redistribution_hook
from meshwright.reshard.dtensor.redistribute_local import Redistributor

OpLayer = Callable[[OpCall, RunOp], Any]
"""Function that computes the result of an operator call, given the next layer."""


class OpDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that intercepts all operators on this thread before DTensor.

    Attributes:
        views: the layer that tracks gathered views.
        is_suspended: True while a nested context is active.
    """

    def __init__(self, views: GatheredViews, layers: Sequence[OpLayer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views = views
        self.is_suspended = False
        self._run: RunOp = OpCall.run
        all_layers: list[OpLayer] = [views, *layers]
        for layer in reversed(all_layers):
            self._run = partial(_run_layer, layer, self._run)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run unchanged and their operators are not intercepted."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_suspended or not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return self._run(OpCall(func, args, kwargs or {}))


def _run_layer(layer: OpLayer, run: RunOp, call: OpCall) -> Any:
    return layer(call, run)


def active_context() -> OpDispatchMode | None:
    """Return this thread's active mode, or None."""
    return next((mode for mode in active_modes() if isinstance(mode, OpDispatchMode) and not mode.is_suspended), None)


@contextmanager
def dispatch_context(*layers: OpLayer, on_gather: OnGather | None = None) -> Iterator[None]:
    """Run redistributions on this thread with Meshwright's plans, and operators through `layers`, within the block.

    Args:
        layers: layers to run after the standard ones for views, losses, partial values and shard orders.
        on_gather: callback before a write to a gathered view (see `GatheredViews`).
    """
    outer, mover = active_context(), Redistributor()
    views = GatheredViews(mover, on_gather, outer.views.origins if outer else None)
    if outer:
        outer.is_suspended = True
    try:
        with (
            redistribution_hook(mover),
            OpDispatchMode(views, [correct_mean_losses, correct_partial_ops, ShardOrders(mover), *layers]),
        ):
            yield
    finally:
        if outer:
            outer.is_suspended = False


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
    if active_context():
        yield
    else:
        with dispatch_context():
            yield
