"""What a failed proof under cp is compared with: full samples without a fault are the reference, contributions of token
shards sum to its gradients, and every known fault changes it."""

from __future__ import annotations

import pytest
import torch

from meshwright.config.schema import RunConfig
from meshwright.plan.make_plan import make_plan
from meshwright.prove.placement import ContextPlacement, context_placement_of
from meshwright.prove.record.context_variants import ContextVariants
from meshwright.prove.record.faulty_context import ContextFault
from meshwright.prove.record.reference_run import compute_reference
from meshwright.prove.record.token_contributions import token_contributions
from meshwright.prove.record.token_reference import TokenReference
from tests.helpers import open_data
from tests.prove.proofs import reference, small_config, small_expert_config

CP = ("mesh.cp=2", "mesh.dp_shard=2", "train.num_microbatches=2", "model.tie_embeddings=true")
CONFIGS = {
    "dense": small_config(*CP, "model.window=6", "model.global_every=2"),
    "experts": small_expert_config("mesh.cp=4", "model.z_loss=0.01", "model.num_shared_experts=1"),
    "global batch": small_expert_config("mesh.cp=2", "mesh.dp_shard=2", "model.balance_scope=global-batch"),
}


def placement(config: RunConfig) -> ContextPlacement:
    found = context_placement_of(make_plan(config), config.mesh.axes())
    assert found is not None
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_contributions_of_tokens_sum_to_the_gradient(name: str) -> None:
    config = CONFIGS[name]
    found, expected = token_contributions(config, open_data(config), placement(config)), reference(config)
    assert found.partial_gradients.keys() == expected.gradients.keys()
    for parameter, parts in found.partial_gradients.items():
        by_cell = expected.partial_gradients[parameter]
        grid = (config.mesh.axes().data_parallel(), config.mesh.cp, *by_cell.shape[1:])
        torch.testing.assert_close(parts.view(grid).sum(1), by_cell, rtol=1e-11, atol=1e-14)
        assert all(part.any() for part in parts.flatten(0, 1)) or "experts" in parameter
    if name == "dense":  # elsewhere, auxiliary losses are of no token
        assert expected.partial_losses is not None
        losses = found.partial_losses.view(2, 2, 2).sum(1)
        torch.testing.assert_close(losses, expected.partial_losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_full_samples_without_a_fault_are_the_reference(name: str) -> None:
    config = CONFIGS[name]
    samples = TokenReference(config, open_data(config), placement(config), ContextFault())
    found = compute_reference(config, open_data(config), num_steps=1, samples_of=samples)
    assert found.losses[0] == pytest.approx(reference(config).losses[0], rel=1e-13)
    torch.testing.assert_close(found.gradients, reference(config).gradients, rtol=1e-11, atol=1e-14)


@pytest.mark.slow
def test_every_known_fault_changes_the_gradient() -> None:
    config = small_config("mesh.cp=4", "model.window=6", "model.global_every=2")
    expected, names = reference(config), set()
    for variant in ContextVariants(config, open_data(config), placement(config)).of_first_step():
        names.add(variant.what)
        changed = [n for n, g in variant.evidence.gradients.items() if not torch.allclose(g, expected.gradients[n])]
        assert changed, variant.what
    assert len(names) > 100
