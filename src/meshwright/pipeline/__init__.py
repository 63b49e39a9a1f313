"""Pipeline schedules as tables. Every training step runs a schedule, even without pipeline parallelism."""

from meshwright.pipeline.actions import Action, ActionKind, Overlap
from meshwright.pipeline.generate import generate
from meshwright.pipeline.lower import lower
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import Costs, EdgeCosts, StageCosts, simulate
from meshwright.pipeline.verify import verify

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "EdgeCosts",
    "Overlap",
    "Schedule",
    "StageCosts",
    "generate",
    "lower",
    "simulate",
    "verify",
]
