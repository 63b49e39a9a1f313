"""Display unit of a loss. Doesn't import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class LossUnit:
    """Unit in which a loss is displayed."""

    name: str
    scale: float = 1.0
    """Factor from the loss's own unit to this one."""
    own: str = ""
    """Name of the loss's own unit, if that is another one."""

    def unscaled(self) -> LossUnit:
        """Return the loss's own unit."""
        return LossUnit(self.own or self.name)

    def words(self, loss: float) -> str:
        """Format a loss in this unit."""
        return f"{loss * self.scale:.3f} {self.name}"

    def metric(self, name: str) -> str:
        """Return the name of a metric in this unit, such as `loss_bits_per_byte`."""
        return f"{name}_" + re.sub(r"\W+", "_", self.name.replace("/", " per "))


def unit_of_metric(key: str) -> str:
    """Return the name of the unit in a metric's key: `bits/byte` for `loss_bits_per_byte`, nothing for `loss`."""
    return key.partition("loss_")[2].replace("_per_", "/").replace("_", " ")
