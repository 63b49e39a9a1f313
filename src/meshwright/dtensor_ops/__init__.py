"""Corrections for DTensor operators: sharding rules, fixes for wrong results, and a fallback to replicated tensors.

`for_dtensor` and `replicate_fallback` are context managers; `register_rules` only registers the sharding rules.
"""

import sys
from typing import TYPE_CHECKING

from meshwright.lazy_package import LazyPackage

if TYPE_CHECKING:
    from meshwright.dtensor_ops.fallback import replicate_fallback
    from meshwright.dtensor_ops.operator_context import for_dtensor
    from meshwright.dtensor_ops.sharding_rules import register_rules

_FILES = {"for_dtensor": "operator_context", "register_rules": "sharding_rules", "replicate_fallback": "fallback"}
"""Modules by the public name they define, imported lazily because they need torch."""

__all__ = ["for_dtensor", "register_rules", "replicate_fallback"]

sys.modules[__name__].__class__ = LazyPackage
