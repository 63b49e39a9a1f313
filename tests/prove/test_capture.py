"""Captured layers are proved with their layout, from the second step on; a fault of a runner fails the proof."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest

from meshwright.prove.report import render
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.gangs.gang import GangPool
from tests.prove.proofs import proof, small_config, small_dit_config, small_expert_config
from tests.prove.seeded_faults import Fault

LAYER = "capture.scope=layer"
SPLIT = ("mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4")


@pytest.mark.slow
def test_captured_layouts_are_proved(gang: GangPool) -> None:
    for config in (
        small_config(LAYER, *SPLIT),
        small_config(LAYER, "mesh.dp_shard=2", "recompute.policy=full", "train.dropout=0.1"),
        small_expert_config("capture.scope=['attention','moe_router']", "mesh.dp_shard=2", "mesh.ep=2"),
        small_dit_config(LAYER, "mesh.pp=2", "train.num_microbatches=2"),
    ):
        result = proof(gang, config, few=True)
        assert result.passed, "\n".join(render(result))


def _in_captured_steps(step: TrainStep, change: Any) -> None:
    """Change the runner once there is one."""
    session = step._job.features["capture"].session
    capture_what_can_be = session._capture_what_can_be

    def changed() -> Any:
        layers, plan, runner = capture_what_can_be()
        change(runner)
        return layers, plan, runner

    session._capture_what_can_be = changed


def add_twice(job: Job, step: TrainStep) -> None:
    """Gradients of the first captured layer count twice."""

    def change(runner: Any) -> None:
        gradients = next(iter(runner._layers.values())).gradients
        store = gradients.store
        gradients.store = lambda position, gradient: store(position, 2 * gradient)

    _in_captured_steps(step, change)


def keep_old_weights(job: Job, step: TrainStep) -> None:
    """Graphs read the weights of the first step."""

    def change(runner: Any) -> None:
        for layer in runner._layers.values():
            layer.weights.expire = MethodType(lambda self: None, layer.weights)
            layer.weights._is_fresh = False

    _in_captured_steps(step, change)


FAULTS = {
    "twice": Fault(add_twice, (LAYER,), ()),
    "old weights": Fault(keep_old_weights, (LAYER, "mesh.dp_shard=2"), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_runner_fails_the_proof(gang: GangPool, fault: str) -> None:
    config = small_config(*FAULTS[fault].layout)
    assert not proof(gang, config, __name__, "FAULTS", fault).passed
