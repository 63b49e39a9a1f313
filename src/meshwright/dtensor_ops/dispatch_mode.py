"""One dispatch mode for all that sees operators before DTensor does, within `for_dtensor` and `replicate_fallback`.

What has to be seen to comes in layers, each of which runs an operator by the next one, and the last by DTensor. A mode
for each would cost every operator about as much as DTensor's own dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.gathered_views import Gathers, Views
from meshwright.dtensor_ops.mean_losses import losses
from meshwright.dtensor_ops.partial_ops import mended
from meshwright.dtensor_ops.private import OpOverload, TorchDispatchMode, active_modes
from meshwright.dtensor_ops.run_replicated import Call, Run
from meshwright.dtensor_ops.shard_order_ops import Orders
from meshwright.dtensor_ops.sharding_rules import register_rules
from meshwright.reshard.dtensor import redistribution_hook
from meshwright.reshard.dtensor.redistribute_local import Redistributor

Layer = Callable[[Call, Run], Any]
"""Returns what an operator returns, by a `Run`."""


class ContextMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of this thread before DTensor does.

    Attributes:
        views: what it knows of views.
        is_suspended: a context inside this one is in charge.
    """

    def __init__(self, views: Views, layers: Sequence[Layer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views = views
        self.is_suspended = False
        self._run: Run = Call.run
        every: list[Layer] = [views, *layers]
        for layer in reversed(every):
            self._run = partial(_through, layer, self._run)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions are compiled within it as without it; what they compute is not seen."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_suspended or not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return self._run(Call(func, args, kwargs or {}))


def _through(layer: Layer, run: Run, call: Call) -> Any:
    return layer(call, run)


def active_context() -> ContextMode | None:
    """The one that is in charge on this thread."""
    return next((mode for mode in active_modes() if isinstance(mode, ContextMode) and not mode.is_suspended), None)


@contextmanager
def entered(*layers: Layer, gathers: Gathers | None = None) -> Iterator[None]:
    """Within the block, this thread's redistributions go by plans, and its operators through `layers`.

    Args:
        layers: after those for views, losses, mended operators and orders of cuts, which are always there.
        gathers: see `Views`.
    """
    outer, mover = active_context(), Redistributor()
    views = Views(mover, gathers, outer.views.origins if outer else None)
    if outer:
        outer.is_suspended = True
    try:
        with redistribution_hook(mover), ContextMode(views, [losses, mended, Orders(mover), *layers]):
            yield
    finally:
        if outer:
            outer.is_suspended = False


@contextmanager
def for_dtensor() -> Iterator[None]:
    """Within the block, DTensor's own redistributions in this thread are planned and run by Meshwright.

    That goes for operators that need other placements, `DTensor.redistribute`, `full_tensor`, and the backward if it
    runs within the block. PyTorch's own planner still has what has no layout (`_MaskPartial`), asynchronous
    redistributions, tracing, symbolic sizes, and reductions that `reduce` refuses. All ranks of a mesh enter it, or
    none. Operators get the rules of `rules`, which stay when the block ends, and keep to orders of cuts (`orders`) and
    views (`views`). Within another such block it changes nothing.
    """
    register_rules()
    if active_context():
        yield
    else:
        with entered():
            yield
