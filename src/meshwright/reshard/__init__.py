"""From one layout of a tensor to another: plans of collectives, priced, verified, drawn and run.

Plans and layouts do without torch. What runs them is imported when it is asked for.
"""

from importlib import import_module
from typing import Any

from meshwright.mesh.layout import Layout
from meshwright.reshard.cost import Topology
from meshwright.reshard.planner import clear_cache, plan
from meshwright.reshard.steps import ReshardPlan
from meshwright.reshard.transfer import TransferPlan, plan_transfer
from meshwright.reshard.verify import verify
from meshwright.reshard.verify_transfer import verify_transfer

_WITH_TORCH = {
    "for_dtensor": "dtensor",
    "groups_of": "groups",
    "layout_of": "placements",
    "prepare": "groups",
    "redistribute": "dtensor",
    "redistribute_across": "across",
    "register_rules": "rules",
    "replicate_fallback": "fallback",
}
"""Public names of files that import torch, and the files."""

__all__ = [
    "Layout",
    "ReshardPlan",
    "Topology",
    "TransferPlan",
    "clear_cache",
    "plan",
    "plan_transfer",
    "verify",
    "verify_transfer",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
