"""Build, verify, cost and compare run plans. Doesn't import torch.

The package is callable: `meshwright.plan(config)` is `meshwright.api.plan`.
"""

import sys

from meshwright.lazy_package import Verb

sys.modules[__name__].__class__ = Verb
