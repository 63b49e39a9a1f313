"""CUDA graphs as plans: made, verified and drawn without a GPU; captured, or simulated on any device, by `run`.

Plans need no torch. Public names that do are imported lazily.
"""

import sys
from typing import TYPE_CHECKING

from meshwright.capture.plan import CaptureMode, CapturePlan, plan_capture
from meshwright.capture.signature import ArgumentSignature, LayerSignature, ResultSignature, TensorSignature
from meshwright.capture.verify import verify_capture
from meshwright.lazy_package import LazyPackage

if TYPE_CHECKING:
    from meshwright.capture.run.capture import capture, observe
    from meshwright.capture.run.runner import Runner
    from meshwright.capture.run.scopes import graph_region

_FILES = {"Runner": "run.runner", "capture": "run.capture", "graph_region": "run.scopes", "observe": "run.capture"}
"""Module that defines each public name that needs torch."""

__all__ = [
    "ArgumentSignature", "CaptureMode", "CapturePlan", "LayerSignature", "ResultSignature", "Runner", "TensorSignature",
    "capture", "graph_region", "observe", "plan_capture", "verify_capture",
]  # fmt: skip

sys.modules[__name__].__class__ = LazyPackage
