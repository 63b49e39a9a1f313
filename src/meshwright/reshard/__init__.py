"""From one layout of a tensor to another: plans of collectives, priced, verified, drawn and run."""

from importlib import import_module
from typing import Any

from meshwright.reshard.cost import Topology
from meshwright.reshard.planner import clear_cache, plan

__all__ = ["Topology", "clear_cache", "plan"]

_WITH_TORCH = {"for_dtensor": "dtensor", "groups_of": "groups", "layout_of": "placements", "prepare": "groups",
               "redistribute": "dtensor"}  # fmt: skip
"""Names that are imported when they are asked for, since plans do without torch; and where they are."""


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
