"""Plan-based redistribution of DTensors.

Exports the low-level functions that other packages use; only this package imports `private`.
"""

from meshwright.reshard.dtensor.private import PLANNING as PLANNING
from meshwright.reshard.dtensor.private import DTensorSpec as DTensorSpec
from meshwright.reshard.dtensor.private import Handler as Handler
from meshwright.reshard.dtensor.private import HandlerTable as HandlerTable
from meshwright.reshard.dtensor.private import Patches as Patches
from meshwright.reshard.dtensor.private import active_hook as active_hook
from meshwright.reshard.dtensor.private import active_interceptor as active_interceptor
from meshwright.reshard.dtensor.private import intercepted as intercepted
from meshwright.reshard.dtensor.private import is_mixing as is_mixing
from meshwright.reshard.dtensor.private import is_tracing as is_tracing
from meshwright.reshard.dtensor.private import local_of as local_of
from meshwright.reshard.dtensor.private import mixing_refused as mixing_refused
from meshwright.reshard.dtensor.private import new_dtensor as new_dtensor
from meshwright.reshard.dtensor.private import own_handlers as own_handlers
from meshwright.reshard.dtensor.private import redistribution_hook as redistribution_hook
from meshwright.reshard.dtensor.private import run_below as run_below
from meshwright.reshard.dtensor.private import run_torch_function as run_torch_function
from meshwright.reshard.dtensor.private import spec_of as spec_of
from meshwright.reshard.dtensor.private import wait_tensor as wait_tensor
from meshwright.reshard.dtensor.private import with_dim as with_dim
