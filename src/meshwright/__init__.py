"""Meshwright: plan, prove and run the training of transformers on any number of devices.

```python
import meshwright

config = meshwright.load_config("llama-tiny", "mesh.dp_shard=2", "train.steps=20")
meshwright.plan(config)   # returns a RunPlan
meshwright.prove(config)  # returns a Proof, true if it passed
meshwright.run(config)    # returns a RunResult with losses and folder
```

The verbs are documented in `meshwright.api`. The library parts (`meshwright.pipeline`, `.reshard`, `.dtensor_ops`,
`.comm`, `.checkpoint`) are imported lazily. Importing the package imports neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # For type checkers the verbs hide the rooms of the same name, which code imports from by their whole names.
    from meshwright.api import Proof, RunResult, load_config, plan, prove, run

__version__ = "0.1.0"

_VERBS = ("load_config", "run", "Proof", "RunResult")
_ROOMS = ("checkpoint", "comm", "pipeline", "plan", "prove", "reshard")

__all__ = ["Proof", "RunResult", "load_config", "plan", "prove", "run"]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module("meshwright.api"), name)
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_VERBS, *_ROOMS})
