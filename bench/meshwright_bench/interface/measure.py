"""Run the jobs of `bench interface`: the same training, by our model and by transformers' of the same parameters."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import RunError
from meshwright.models.hf_format.weights import HuggingFaceWeights
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import alternate
from meshwright_bench.benchmarks import Benchmark
from meshwright_bench.interface.cases import MASKS, OURS, SAME_LOSS, InterfaceTask, dimensions
from meshwright_bench.packing.measure import NextStep, open_corpus, processor_seconds


def measure(context: RankContext, task: InterfaceTask) -> None:
    """Measure the sides, and write their seconds to the task's result file."""
    task.result.write_text(json.dumps(measure_sides(context, task)), "utf-8")


def measure_sides(context: RankContext, task: InterfaceTask) -> dict[str, list[float]]:
    """Return seconds of processor time per step and round of every side.

    Raises:
        RunError: the sides' losses differ.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-interface-") as folder:
        steps = {}
        for side in MASKS[task.mask]:
            inside = Path(folder, side)
            inside.mkdir()
            config = task.config(side, inside)
            steps[side] = NextStep(config, open_corpus(config), context)
            if side == OURS:
                weights = config.family.other_weights()
                assert isinstance(weights, HuggingFaceWeights), "our model has their format"
                names = {mapped.name: mapped.theirs[0] for mapped in weights.architecture.tensors(dimensions())}
                values = {names[name]: p.detach().clone() for name, p in steps[side].model.named_parameters()}
            else:
                _set(steps[side].model, values)
        _check_losses({side: step().loss for side, step in steps.items()}, task)
        timed = alternate(steps, timer=processor_seconds, rounds=task.rounds, steps=task.steps)
    return {side: list(seconds) for side, seconds in timed.seconds.items()}


def _set(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Give a model of transformers our model's parameters."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == values.keys(), "the sides have the same parameters"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def _check_losses(losses: dict[str, float], task: InterfaceTask) -> None:
    if max(losses.values()) - min(losses.values()) <= SAME_LOSS:
        return
    raise RunError(
        f"the sides have other losses: {', '.join(f'{side} {loss:.6f}' for side, loss in losses.items())}",
        where=f"bench {Benchmark.INTERFACE}, {task.mask}",
        rule=f"they agree to {SAME_LOSS:g} nats per token, else the comparison is meaningless",
        fix="this is a bug: please report it with this message",
    )
