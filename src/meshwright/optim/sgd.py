"""Stochastic gradient descent with momentum (Polyak 1964), as PyTorch's SGD but with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.optim.contract import Optimizer, Settings, Slot, State
from meshwright.optim.role import Role


class SGD(Optimizer):
    """Heavy ball: m ← μ m + g, then p ← (1 − η λ) p − η m, with momentum μ, learning rate η and weight decay λ."""

    def states(self, role: Role) -> Mapping[str, State]:
        """Return the momentum."""
        return {"momentum": State()}

    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update the parameters one by one."""
        for slot in slots:
            momentum = slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient)
            slot.parameter.mul_(1 - settings.lr * settings.weight_decay).add_(momentum, alpha=-settings.lr)
