"""Predictions of published runs, and how far they are off. Doesn't import torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import preset_on
from meshwright.cluster.stacks import Stack
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.time.step_time import predict_step
from meshwright_bench.published.plans import Made, plans_of
from meshwright_bench.published.programs import PROGRAMS
from meshwright_bench.published.rows import Row


@dataclass(frozen=True)
class Prediction:
    """A prediction of a row."""

    made: Made
    seconds: float
    parts: dict[str, float]
    """Seconds by part."""
    memory_bytes: int

    @property
    def row(self) -> Row:
        return self.made.row

    @property
    def error(self) -> float:
        """Predicted over measured tokens per second, minus 1."""
        measured = self.row.seconds
        assert measured is not None  # or the row would be out
        return measured / self.seconds - 1.0


def predict(made: Made, cluster: Cluster, stack: Stack) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and those of its parts. A program that reduces gradients after every micro-batch
    takes as many steps of one, but updates parameters once."""
    found = predict_step(made.plan, cluster, stack=stack)
    repeats = {name: 1 if name in ("optimizer", "step") else made.repeats for name in found.parts}
    parts = {name: repeats[name] * us / 1e6 for name, us in found.parts.items()}
    return sum(parts.values()), parts


def predict_row(row: Row) -> Prediction:
    """Return the prediction of a row; of what it doesn't state, the fastest that fits."""
    return min((predict_made(one) for one in plans_of(row)), key=lambda one: one.seconds)


def predict_made(made: Made) -> Prediction:
    cluster = preset_on(made.cluster, made.link)
    seconds, parts = predict(made, cluster, PROGRAMS[made.program].stack)
    return Prediction(made, seconds, parts, predict_cuda_memory(made.plan).total())
