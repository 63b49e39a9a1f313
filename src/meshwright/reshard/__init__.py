"""From one layout of a tensor to another: plans of collectives, priced, verified, drawn and run."""

from meshwright.reshard.cost import Topology
from meshwright.reshard.planner import clear_cache, plan

__all__ = ["Topology", "clear_cache", "plan"]
