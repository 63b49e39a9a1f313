"""Your own optimizer: momentum, divided by a size per row and clipped. Run it from any folder on PYTHONPATH:

    meshwright prove llama-tiny mesh.dp_shard=2 train.optimizer=own_optimizer:RowScaled
    meshwright run llama-tiny mesh.dp_shard=2 train.optimizer=own_optimizer:RowScaled train.lr=1e-3

Its states are unlike Adam's: momentum in every element, and one number per row of a matrix, which is sharded with the
rows. That one is a mean over columns, so it needs whole rows: layouts that shard columns, such as tensor parallelism,
are refused before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.optim.contract import Optimizer, Settings, Slot, State
from meshwright.optim.role import Role


class RowScaled(Optimizer):
    """Momentum, divided by the root mean square that gradients of its row have had, and clipped to 1."""

    def states(self, role: Role) -> Mapping[str, State]:
        """Return what is kept for a parameter: a vector has no rows, and so a scale per element."""
        return {"momentum": State(), "row_square": State() if role is Role.VECTOR else State(dims=(0,))}

    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update this rank's shards in place."""
        beta1, beta2 = settings.beta1, settings.beta2
        for slot in slots:
            square = slot.gradient.square()
            for dim in range(slot.gradient.dim() - 1, 0, -1):
                square = square.mean(dim)
            row = slot.state["row_square"].lerp_(square, 1 - beta2)
            momentum = slot.state["momentum"].lerp_(slot.gradient, 1 - beta1)
            scale = (row + settings.eps).rsqrt().view(-1, *[1] * (momentum.dim() - 1))
            slot.parameter.mul_(1 - settings.lr * settings.weight_decay)
            slot.parameter.sub_(settings.lr * (momentum * scale).clamp(-1, 1))
