"""What a loss is shown in. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossUnit:
    """A unit for people."""

    name: str
    scale: float = 1.0
    """Of this unit in one of the loss's own."""

    def words(self, loss: float) -> str:
        """A loss for people."""
        return f"{loss * self.scale:.3f} {self.name}"
