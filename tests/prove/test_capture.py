"""Captured layers are proved with their layout, from the second step on; a fault of a runner fails the proof."""

from __future__ import annotations

import pytest

from meshwright.prove.report import render
from tests.prove.proofs import NUM_STEPS, Seed, proof, small_config, small_dit_config, small_expert_config
from tests.prove.seeded_faults import Fault, giving, replacing, taking

LAYER = "capture.scope=layer"
SPLIT = ("mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4")


@pytest.mark.slow
def test_captured_layouts_are_proved(gang):
    for config in (
        small_config(LAYER, *SPLIT),
        small_config(LAYER, "mesh.dp_shard=2", "recompute.policy=full", "train.dropout=0.1"),
        small_expert_config("capture.scope=['attention','moe_router']", "mesh.dp_shard=2", "mesh.ep=2"),
        small_dit_config(LAYER, "mesh.pp=2", "train.num_microbatches=2"),
    ):
        result = proof(gang, config)
        assert result.passed, "\n".join(render(result))


def in_captured_steps(change):
    """Change the captured layers once there are any."""

    def changed(job, found):
        for layer in found[2]._layers.values():
            change(layer)
        return found

    return lambda job, step: replacing(job.features["capture"].session, "_capture_what_can_be", giving(changed))(
        job, step
    )


def add_twice(layer):
    """Gradients of the layer count twice."""
    layer.gradients.store = taking(lambda _, position, gradient: (position, 2 * gradient))(None, layer.gradients.store)


def keep_old_weights(layer):
    """Graphs read the weights of the first step."""
    layer.weights.expire = lambda: None
    layer.weights._is_fresh = False


FAULTS = {
    "twice": Fault(in_captured_steps(add_twice), (LAYER,), ()),
    "old weights": Fault(in_captured_steps(keep_old_weights), (LAYER, "mesh.dp_shard=2"), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_runner_fails_the_proof(gang, fault):
    config = small_config(*FAULTS[fault].layout)
    assert not proof(gang, config, Seed(__name__, "FAULTS", fault), steps=NUM_STEPS).passed
