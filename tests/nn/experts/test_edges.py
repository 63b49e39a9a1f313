"""Edges of layers with experts: no tokens, scores that underflow, a handle waited for twice."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm import start_all_to_all
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import Router
from meshwright.nn.experts.router_config import RouterConfig, Score

CONFIGS = {
    "dropless": RouterConfig(8, 2, balance_loss=0.1, z_loss=0.1),
    "capacity": RouterConfig(8, 2, balance_loss=0.1, capacity_factor=1.0),
    "global batch": RouterConfig(8, 2, balance_loss=0.1, over_batch=True),
    "groups": RouterConfig(8, 2, score=Score.SIGMOID, num_groups=4, top_groups=2, bias_rate=0.1),
}


@pytest.mark.parametrize("shape", [(0, 4, 16), (2, 0, 16)], ids=["no samples", "empty samples"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_without_tokens_has_gradients_of_zero(config, shape):
    layer = MixtureOfExperts(16, config, expert_dim=8, shared_dim=8).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == shape
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("score", Score)
def test_scores_that_underflow_give_finite_weights(score):
    router = Router(4, RouterConfig(4, 2, score=score, bias_rate=1.0, balance_loss=0.1))
    torch.nn.init.zeros_(router.gate.weight)
    with torch.no_grad():
        router.gate.weight[0, 0] = 100.0
        router.load.bias.copy_(torch.tensor([-9.0, 0.0, 0.0, 1.0]))  # never the expert with all of the softmax
    for sign in (1.0, -1.0):
        x = torch.full((1, 3, 4), sign * 3.0, requires_grad=True)
        routing = router(x)
        routing.weights_nk.sum().backward()
        assert routing.weights_nk.isfinite().all() and x.grad.isfinite().all()


def test_rows_are_waited_for_once():
    handle = start_all_to_all(torch.ones(2, 3), send_splits=[2], recv_splits=[2])
    handle.wait()
    with pytest.raises(AssertionError, match="waited for once"):
        handle.wait()
