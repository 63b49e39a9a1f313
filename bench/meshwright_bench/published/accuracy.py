"""Predictions of published runs, and how far they are off. Doesn't import torch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import cluster_preset, preset_on
from meshwright.cluster.stacks import Stack
from meshwright.pipeline.simulate import Costs, StageCosts, peak_bytes
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.memory import by_pipeline_rank, stage_bytes
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.time.communication import added
from meshwright.plan.time.step_time import StepTime, predict_step
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
    if made.further:
        each = [_work(made.plan, found, place, cluster) for place in range(made.plan.schedule.num_ranks)]
        busiest = max(each, key=lambda one: sum(one.values()))
        parts = added(parts, {name: made.further * us / 1e6 for name, us in busiest.items()})
    return sum(parts.values()), parts


def _work(plan: RunPlan, found: StepTime, place: int, cluster: Cluster) -> dict[str, float]:
    """Return what a micro-batch takes on a rank of a pipeline, in µs by part."""
    stages = plan.schedule.stages_of(place)
    actions = 2 * len(stages) * cluster.performance.host.action_us
    return added(*(found.stages[number].parts for number in stages), {"host": actions})


def predict_row(row: Row) -> Prediction:
    """Return the prediction of a row; of what it doesn't state, the fastest that fits."""
    return min((predict_made(one) for one in plausible_plans(row)), key=lambda one: one.seconds)


def plausible_plans(row: Row) -> list[Made]:
    """Return a row's plans that fit; all, if none does."""
    found = list(plans_of(row))
    return [one for one in found if fits(one, predict_memory(one))] or found


def fits(made: Made, memory_bytes: int) -> bool:
    """Return whether a device has this memory."""
    return memory_bytes <= cluster_preset(made.cluster).device.memory_bytes


def predict_made(made: Made) -> Prediction:
    cluster = preset_on(made.cluster, made.link)
    seconds, parts = predict(made, cluster, PROGRAMS[made.program].stack)
    return Prediction(made, seconds, parts, predict_memory(made))


def predict_memory(made: Made) -> int:
    """Return the bytes of the rank with the most, by the measure that the program's runs state."""
    program, plan = PROGRAMS[made.program], made.plan
    allocated = predict_cuda_memory(plan).total() - _narrower(made)
    if program.state_bytes is not None:
        activations = [rank.activations for rank in by_pipeline_rank(plan, on_cuda=True)]
        activations = _saved(plan) if program.counts_saved else activations
        activations = _buffered(plan) if program.buffers and len(plan.stages) > 1 else activations
        states = (program.state_bytes * _parameters(plan, place) for place in range(len(activations)))
        allocated = max(map(add, activations, states))
    return int(program.reserved * allocated + program.context_bytes)


def _narrower(made: Made) -> int:
    """Return how much smaller the weights that a stage keeps gathered are in float8 than in 16 bits."""
    if made.config.float8.recipe == "none" or not PROGRAMS[made.program].by_tensor:
        return 0
    plan = made.plan
    held = ([(stage, kind, one) for kind, _, one in plan.parameters(stage) if kind.is_block] for stage in plan.stages)
    return min(sum(plan.elements(p) for s, kind, p in found if not plan.unit_of(s, kind, p).freed) for found in held)


def _saved(plan: RunPlan) -> list[int]:
    """Return the bytes that each rank of the pipeline saves for the backward at most."""
    costs = (StageCosts(activation_bytes=stage_bytes(plan, stage, on_cuda=True).saved) for stage in plan.stages)
    return [rank.activations for rank in peak_bytes(plan.schedule, Costs(list(costs)))]


def _buffered(plan: RunPlan) -> list[int]:
    """Return what the first stage of OneFlow's pipelines holds besides states, where its memory was measured.

    It is planned ahead: what a stage's backward takes from its forward has twice as many copies as there are stages
    (OneFlow, pipeline_buffer_pass.cpp), and each tensor to or from another stage, such as the head's table and its
    gradient, one where it is sent and two where it arrives. Forward and backward share no memory, nor do gradients of a
    micro-batch and their sums, and weights are copied once for all micro-batches: four bytes per parameter.
    """
    sizes = stage_bytes(plan, plan.stages[0], on_cuda=True)
    table = 2 * sum(plan.elements(one) for kind in plan.kinds for one in kind.parameters if one.name == "embed.weight")
    copies = (1 + 2 * len(plan.stages)) * sizes.saved + 3 * (sizes.stream + table)
    return [copies + 2 * sizes.running + 4 * _parameters(plan, 0)]


def _parameters(plan: RunPlan, place: int) -> int:
    """Return the elements of a rank's parameters."""
    held = (plan.stages[number] for number in plan.schedule.stages_of(place))
    return sum(plan.elements(one) for stage in held for _, _, one in plan.parameters(stage))
