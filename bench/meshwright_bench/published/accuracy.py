"""Predictions of published runs, and how far they are off. Doesn't import torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import preset_on
from meshwright.cluster.stacks import Stack
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.memory import by_pipeline_rank
from meshwright.plan.run_plan import RunPlan
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

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory, minus 1, if it was measured."""
        measured = self.row.memory_bytes
        return None if measured is None else self.memory_bytes / measured - 1.0


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
    return Prediction(made, seconds, parts, predict_memory(made))


def predict_memory(made: Made) -> int:
    """Return the bytes of the rank with the most, by the measure that the program's runs state."""
    program, plan = PROGRAMS[made.program], made.plan
    allocated = predict_cuda_memory(plan).total()
    if program.state_bytes is not None:
        allocated = max(_replicated(plan, place, rank.activations, program.state_bytes)
                        for place, rank in enumerate(by_pipeline_rank(plan, on_cuda=True)))  # fmt: skip
    return int(program.reserved * allocated + program.context_bytes)


def _replicated(plan: RunPlan, place: int, activations: int, state_bytes: int) -> int:
    """Return the bytes of a rank without FSDP: its parameters' states, and activations."""
    held = (plan.stages[number] for number in plan.schedule.stages_of(place))
    return activations + state_bytes * sum(plan.elements(one) for stage in held for _, _, one in plan.parameters(stage))
