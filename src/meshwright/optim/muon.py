"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon): momentum, made orthogonal matrix by matrix.

With weight decay and updates of the size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training", equation 4),
so that learning rate and decay found for AdamW are a good start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.optim.contract import MatrixOptimizer, Settings, Slot, State
from meshwright.optim.role import Role

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of a X + b (X Xᵀ) X + c (X Xᵀ)² X, which drives singular values to 0.7 … 1.2 (Jordan 2024)."""
NUM_ITERATIONS = 5
SIZE = 0.2
"""Root mean square of an update's elements, about that of AdamW's (Liu et al. 2025, section 2.2)."""
TINY = 1e-7
"""Added to a matrix's norm, by which it is divided."""


class Muon(MatrixOptimizer):
    """Muon for matrices, of experts too; AdamW updates embeddings, the output head and vectors."""

    def states(self, role: Role) -> Mapping[str, State]:
        """Return the momentum."""
        return {"momentum": State()}

    def prepare(self, slot: Slot, settings: Settings) -> Tensor:
        """Return Nesterov's momentum: m ← μ m + g, then g + μ m."""
        momentum = slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient)
        return slot.gradient.add(momentum, alpha=settings.momentum)

    def transform(self, matrices: Tensor) -> Tensor:
        """Return matrices with the same singular vectors whose singular values are all about 1."""
        return orthogonalize(matrices)

    def apply(self, slot: Slot, update: Tensor, settings: Settings) -> None:
        """Decay the parameter and add the update, scaled by its longer side so that its elements have AdamW's size."""
        slot.parameter.mul_(1 - settings.lr * settings.weight_decay)
        slot.parameter.add_(update, alpha=-settings.lr * SIZE * max(slot.shape[-2:]) ** 0.5)

    def cost(self, rows: int, columns: int) -> int:
        """Return the multiplications of an iteration: X Xᵀ, its square, and their sum times X."""
        short, long = sorted((rows, columns))
        return short * short * (2 * long + short)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Run the Newton–Schulz iteration on matrices [..., rows, columns], in their dtype.

    The shorter side is made orthonormal, which is cheaper and the same (Jordan 2024).
    """
    a, b, c = COEFFICIENTS
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + TINY)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x
