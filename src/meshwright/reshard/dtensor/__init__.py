"""Redistribute DTensors by plans of this room.

What rooms above build on below autograd is exported here; `private` is imported by this room alone.
"""

from meshwright.reshard.dtensor.private import (
    DTensorSpec,
    local_of,
    new_dtensor,
    redistributing_by,
    spec_of,
    waited,
)

__all__ = ["DTensorSpec", "local_of", "new_dtensor", "redistributing_by", "spec_of", "waited"]
