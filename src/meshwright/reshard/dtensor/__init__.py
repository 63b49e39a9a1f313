"""Plan-based redistribution of DTensors.

Exports the low-level functions that other packages use; only this package imports `private`.
"""

from meshwright.reshard.dtensor.private import (
    DTensorSpec,
    active_hook,
    local_of,
    new_dtensor,
    redistribution_hook,
    spec_of,
    wait_tensor,
)

__all__ = ["DTensorSpec", "active_hook", "local_of", "new_dtensor", "redistribution_hook", "spec_of", "wait_tensor"]
