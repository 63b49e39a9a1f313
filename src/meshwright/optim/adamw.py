"""AdamW (Loshchilov and Hutter 2019), in PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.optim.contract import Optimizer, Settings, Slot, State
from meshwright.optim.role import Role


class AdamW(Optimizer):
    """AdamW with decoupled weight decay."""

    def states(self, role: Role) -> Mapping[str, State]:
        """Return both moments, and the number of updates as the kernel wants it: a float32 scalar per parameter."""
        return {"step": State((), "float32"), "exp_avg": State(), "exp_avg_sq": State()}

    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update all parameters in one call, on local shards: DTensor's dispatch would triple the kernel's host time
        (4.1 ms instead of 1.3 ms for 147 parameters)."""
        from torch.optim.adamw import adamw

        steps, averages, squares = (
            [slot.state[name] for slot in slots] for name in ("step", "exp_avg", "exp_avg_sq")
        )  # fmt: skip
        adamw(
            [slot.parameter for slot in slots],
            [slot.gradient for slot in slots],
            averages,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            maximize=False,
        )
