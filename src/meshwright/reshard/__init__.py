"""Tensor redistribution: plan, verify, draw and run the collectives that change a tensor's layout.

Plans and layouts do not need torch; the modules that run plans are imported on first access.
"""

import sys
from typing import TYPE_CHECKING

from meshwright.lazy_package import LazyPackage
from meshwright.mesh.layout import Layout
from meshwright.reshard.draw_plan import draw_plan, explain_plan
from meshwright.reshard.planner.plan import clear_cache, plan
from meshwright.reshard.planner.steps import ReshardPlan
from meshwright.reshard.planner.volumes import Topology
from meshwright.reshard.transfer_plan import TransferPlan, plan_transfer
from meshwright.reshard.verify_plan import verify
from meshwright.reshard.verify_transfer import explain_transfer, verify_transfer

if TYPE_CHECKING:
    from meshwright.reshard.dtensor.placements import layout_of
    from meshwright.reshard.dtensor.redistribute import redistribute, redistribute_across
    from meshwright.reshard.run.process_groups import groups_of, prepare

_FILES = {
    "groups_of": "run.process_groups",
    "layout_of": "dtensor.placements",
    "prepare": "run.process_groups",
    "redistribute": "dtensor.redistribute",
    "redistribute_across": "dtensor.redistribute",
}
"""Public names that need torch, and the modules that define them."""

__all__ = [
    "Layout",
    "ReshardPlan",
    "Topology",
    "TransferPlan",
    "clear_cache",
    "draw_plan",
    "explain_plan",
    "explain_transfer",
    "groups_of",
    "layout_of",
    "plan",
    "plan_transfer",
    "prepare",
    "redistribute",
    "redistribute_across",
    "verify",
    "verify_transfer",
]

sys.modules[__name__].__class__ = LazyPackage
