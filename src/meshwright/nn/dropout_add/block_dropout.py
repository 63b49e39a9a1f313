"""Dropout of a block's two branches, at sites numbered by layer."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.nn.dropout_add.module import DropoutAdd

BRANCHES = 2
"""Branches of a block: attention, and the feed-forward layer or experts."""


@dataclass(frozen=True)
class BlockDropout:
    """Dropout of one block."""

    p: float
    """Probability of dropping."""
    seed: int
    """Seed of the run."""
    layer: int

    def adds(self) -> tuple[DropoutAdd, DropoutAdd]:
        """Return the residual additions of the branches."""
        first, second = (
            DropoutAdd(self.p, seed=self.seed, site=BRANCHES * self.layer + branch) for branch in range(BRANCHES)
        )
        return first, second


NO_DROPOUT = BlockDropout(0.0, seed=0, layer=0)
