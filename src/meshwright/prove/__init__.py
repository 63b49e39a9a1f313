"""The proof: a layout computes the same losses, gradients and parameters as one device, with evidence.

Calling the room is `meshwright.api.prove`: `meshwright.prove(config)`.
"""

import sys

from meshwright.callable_module import Verb

sys.modules[__name__].__class__ = Verb
