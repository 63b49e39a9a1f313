"""Pipeline schedules as tables. Every training step runs a schedule, even without pipeline parallelism."""

import sys
from typing import TYPE_CHECKING

from meshwright.lazy_package import LazyPackage

if TYPE_CHECKING:
    from meshwright.pipeline.actions import Action, ActionKind, Overlap
    from meshwright.pipeline.generate import generate
    from meshwright.pipeline.lower import lower
    from meshwright.pipeline.schedule_table import Schedule
    from meshwright.pipeline.simulate import Costs, EdgeCosts, StageCosts, simulate
    from meshwright.pipeline.verify import verify

_FILES = {
    "Action": "actions",
    "ActionKind": "actions",
    "Costs": "simulate",
    "EdgeCosts": "simulate",
    "Overlap": "actions",
    "Schedule": "schedule_table",
    "StageCosts": "simulate",
    "generate": "generate",
    "lower": "lower",
    "simulate": "simulate",
    "verify": "verify",
}
"""Module that defines each public name; runs need neither generators nor checks."""

__all__ = [
    "Action", "ActionKind", "Costs", "EdgeCosts", "Overlap", "Schedule", "StageCosts", "generate", "lower", "simulate",
    "verify",
]  # fmt: skip

sys.modules[__name__].__class__ = LazyPackage
