"""Meshwright: plan, prove and run transformer training on any number of devices.

```python
import meshwright

config = meshwright.load_config("llama-tiny", "mesh.dp_shard=2", "train.steps=20")
meshwright.plan(config)   # returns a RunPlan
meshwright.prove(config)  # returns a Proof, true if it passed
meshwright.run(config)    # returns a RunResult with losses and folder
```

These functions are documented in `meshwright.api`. The subpackages (`meshwright.pipeline`, `.reshard`, `.dtensor_ops`,
`.comm`, `.checkpoint`) are imported lazily, and `import meshwright` imports neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # For type checkers, `plan` and `prove` are the functions; code imports from the packages by their full names.
    from meshwright import checkpoint, comm, dtensor_ops, pipeline, reshard
    from meshwright.api import Proof, RunResult, load_config, plan, prove, run

__version__ = "0.1.0"

_VERBS = ("load_config", "run", "Proof", "RunResult")
_ROOMS = ("checkpoint", "comm", "dtensor_ops", "pipeline", "plan", "prove", "reshard")

__all__ = [
    "Proof",
    "RunResult",
    "checkpoint",
    "comm",
    "dtensor_ops",
    "load_config",
    "pipeline",
    "plan",
    "prove",
    "reshard",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module("meshwright.api"), name)
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
