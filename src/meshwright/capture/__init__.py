"""CUDA graphs as plans: made, verified and drawn without a GPU; captured, or simulated on any device, by `run`.

Plans need no torch. Public names that do are imported lazily.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.capture.plan import CaptureMode, CapturePlan, plan_capture
from meshwright.capture.signature import ArgumentSignature, LayerSignature, ResultSignature, TensorSignature
from meshwright.capture.verify import verify_capture

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


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
