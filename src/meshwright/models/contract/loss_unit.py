"""Display unit of a loss. Doesn't import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossUnit:
    """Unit in which a loss is displayed."""

    name: str
    scale: float = 1.0
    """Factor from the loss's own unit to this one."""

    def words(self, loss: float) -> str:
        """Format a loss in this unit."""
        return f"{loss * self.scale:.3f} {self.name}"
