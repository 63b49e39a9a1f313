"""Captured layers are proved with their layout, from the second step on; a fault of a runner fails the proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.prove.record.layout_run import Tamper
from meshwright.prove.report import render
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.gangs.gang import GangPool
from tests.prove.proofs import NUM_STEPS, Seed, proof, small_config, small_dit_config, small_expert_config
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
        result = proof(gang, config)
        assert result.passed, "\n".join(render(result))


def in_captured_steps(change: Callable[[Any], None]) -> Tamper:
    """Change the captured layers once there are any."""

    def tamper(job: Job, step: TrainStep) -> None:
        session = step._job.features["capture"].session
        real = session._capture_what_can_be

        def changed() -> Any:
            layers, plan, runner = real()
            for layer in runner._layers.values():
                change(layer)
            return layers, plan, runner

        session._capture_what_can_be = changed

    return tamper


def add_twice(layer: Any) -> None:
    """Gradients of the layer count twice."""
    store = layer.gradients.store
    layer.gradients.store = lambda position, gradient: store(position, 2 * gradient)


def keep_old_weights(layer: Any) -> None:
    """Graphs read the weights of the first step."""
    layer.weights.expire = lambda: None
    layer.weights._is_fresh = False


FAULTS = {
    "twice": Fault(in_captured_steps(add_twice), (LAYER,), ()),
    "old weights": Fault(in_captured_steps(keep_old_weights), (LAYER, "mesh.dp_shard=2"), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_runner_fails_the_proof(gang: GangPool, fault: str) -> None:
    config = small_config(*FAULTS[fault].layout)
    assert not proof(gang, config, Seed(__name__, "FAULTS", fault), steps=NUM_STEPS).passed
