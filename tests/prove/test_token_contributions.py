"""Contributions of token shards, which a failed proof under cp is explained by, sum to the gradients."""

from __future__ import annotations

import pytest
import torch

from meshwright.plan.make_plan import make_plan
from meshwright.prove.placement import context_placement_of
from meshwright.prove.record.reference_run import token_contributions
from tests.helpers import open_data
from tests.prove.proofs import plain_model, small_config, small_expert_config

CP = ("mesh.cp=2", "mesh.dp_shard=2", "train.num_microbatches=2", "model.tie_embeddings=true")
CONFIGS = {
    "dense": small_config(*CP, "model.window=6", "model.global_every=2"),
    "experts": small_expert_config("mesh.cp=4", "model.z_loss=0.01", "model.num_shared_experts=1"),
    "global batch": small_expert_config("mesh.cp=2", "mesh.dp_shard=2", "model.balance_scope=global-batch"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_contributions_of_tokens_sum_to_the_gradient(name: str) -> None:
    config, step = CONFIGS[name], 2
    plain, axes = plain_model(config), config.mesh.axes()
    placement = context_placement_of(make_plan(config))
    assert placement is not None
    found, losses = token_contributions(plain, open_data(config), placement, step, plain.initial)
    due, expected = plain.contributions(step, plain.initial), plain.step(step, plain.initial)
    assert found.keys() == expected.gradients.keys()
    for parameter, parts in found.items():
        by_cell = due.gradients[parameter]
        grid = (axes.data_parallel(), axes.cp, *by_cell.shape[1:])
        torch.testing.assert_close(parts.view(grid).sum(1), by_cell, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(by_cell.sum((0, 1)), expected.gradients[parameter], rtol=1e-11, atol=1e-14)
        assert all(part.any() for part in parts.flatten(0, 1)) or "experts" in parameter
    if name == "dense":  # elsewhere, auxiliary losses are of no token
        torch.testing.assert_close(losses.view(2, 2, 2).sum(1), due.losses, rtol=1e-12, atol=0)
        assert float(losses.sum()) == pytest.approx(expected.loss, rel=1e-13)
