"""A run as one value: made from the configuration, verified, priced, and obeyed by what runs it. Torch-free.

Calling the room is `meshwright.api.plan`: `meshwright.plan(config)`.
"""

import sys

from meshwright.callable_module import Verb

sys.modules[__name__].__class__ = Verb
