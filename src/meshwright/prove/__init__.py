"""Prove that a layout computes the same losses, gradients and parameters as a single device.

The package is callable: `meshwright.prove(config)` is `meshwright.api.prove`. `Recorder` is for training scripts that
are not ours; it is imported when it is asked for, since it needs torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.lazy_package import Verb

if TYPE_CHECKING:
    from meshwright.prove.script.recorder import Recorder

__all__ = ["Recorder"]


def __getattr__(name: str) -> Any:
    if name == "Recorder":
        return import_module("meshwright.prove.script.recorder").Recorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = Verb
