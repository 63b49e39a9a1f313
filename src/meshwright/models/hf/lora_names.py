"""Names of parameters of layers with adapters, and whether peft is there. Doesn't import torch.

peft replaces a linear layer `x` by a module with the layer `x.base_layer` and two matrices, `x.lora_A.default` [r, d]
and `x.lora_B.default` [e, r].
"""

from __future__ import annotations

import importlib.util

from meshwright.errors import ConfigError

ADAPTER = "default"
"""peft's name of an only adapter."""
FIRST, SECOND, BASE = f"lora_A.{ADAPTER}", f"lora_B.{ADAPTER}", "base_layer"


def is_adapter(name: str) -> bool:
    """Return whether a parameter is an adapter's, by its name."""
    return name.endswith((f".{FIRST}.weight", f".{SECOND}.weight"))


def original_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the model without adapters."""
    return name.replace(f".{BASE}.", ".")


def check_peft() -> None:
    """Check that peft is installed.

    Raises:
        ConfigError: it is missing.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "peft is not installed",
            where="lora.rank",
            rule="adapters are peft's",
            fix="pip install peft, or lora.rank=0",
        )
