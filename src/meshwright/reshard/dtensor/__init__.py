"""Plan-based redistribution of DTensors.

Exports the low-level functions that other packages use; only this package imports `private`.
"""

from meshwright.reshard.dtensor.private import (
    PLANNING,
    DTensorSpec,
    Handler,
    HandlerTable,
    Patches,
    active_hook,
    active_interceptor,
    intercepted,
    is_mixing,
    is_tracing,
    local_of,
    mixing_refused,
    new_dtensor,
    own_handlers,
    redistribution_hook,
    run_below,
    run_torch_function,
    spec_of,
    wait_tensor,
    with_dim,
)

__all__ = [
    "PLANNING",
    "DTensorSpec",
    "Handler",
    "HandlerTable",
    "Patches",
    "active_hook",
    "active_interceptor",
    "intercepted",
    "is_mixing",
    "is_tracing",
    "local_of",
    "mixing_refused",
    "new_dtensor",
    "own_handlers",
    "redistribution_hook",
    "run_below",
    "run_torch_function",
    "spec_of",
    "wait_tensor",
    "with_dim",
]
