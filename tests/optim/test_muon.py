"""Muon's iteration against the polynomial that it applies to singular values."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.optim.catalogue import SIZE, Muon, orthogonalize
from meshwright.optim.contract import Settings, Slot
from meshwright.optim.role import Role

SETTINGS = Settings(lr=0.1, weight_decay=0.5, beta1=0.9, beta2=0.9, eps=1e-8, momentum=0.8)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (1, 7), (3, 8, 4), (64, 48)])
def test_singular_values_follow_the_polynomial_and_vectors_stay(shape):
    matrices = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    s = s / matrices.square().sum((-2, -1)).sqrt()[..., None]
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalize(matrices), u * s[..., None, :] @ v, rtol=1e-6, atol=1e-6)


def test_a_gradient_of_zeros_updates_nothing():
    """An expert without tokens has one."""
    assert not orthogonalize(torch.zeros(2, 4, 6)).any()


def test_an_update_has_the_size_of_adamws_and_is_nesterovs():
    p, g, m = (torch.randn(40, 60, dtype=torch.float64) for _ in range(3))
    slot = Slot("w", Role.MATRIX, (40, 60), p.clone(), g.clone(), {"momentum": m.clone()})
    Muon().update([slot], SETTINGS)
    momentum = 0.8 * m + g
    torch.testing.assert_close(slot.state["momentum"], momentum)
    update = (p * (1 - 0.1 * 0.5) - slot.parameter) / 0.1
    torch.testing.assert_close(update, SIZE * 60**0.5 * orthogonalize(g + 0.8 * momentum))
    assert 0.15 < update.square().mean().sqrt() < 0.25


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (8, 8)])
def test_cost_is_that_of_the_products(shape):
    with FlopCounterMode(display=False) as counted:
        orthogonalize(torch.randn(shape))
    assert Muon().cost(*shape) == counted.get_total_flops()


@pytest.mark.gpu
def test_bfloat16_on_a_gpu_is_near_float64():
    matrices = torch.randn(4, 96, 160, device="cuda")
    exact = orthogonalize(matrices.double())
    found = orthogonalize(matrices.bfloat16()).double()
    assert (found - exact).norm() < 0.05 * exact.norm()
