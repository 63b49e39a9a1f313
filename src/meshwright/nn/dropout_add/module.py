"""Dropout + add as a layer of a block."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.nn.dropout_add.dropout_add import dropout_add
from meshwright.nn.dropout_add.random import DropoutKey, drop_threshold


class DropoutAdd(nn.Module):
    """Residual dropout: `residual + dropout(x)` while training, `residual + x` otherwise.

    Raises:
        ConfigError: p, the seed or the site is out of range.
    """

    def __init__(self, p: float, *, seed: int, site: int) -> None:
        """Create the layer.

        Args:
            p: probability of dropping.
            seed: seed of the run.
            site: number of this dropout in the whole model, such as 2 · layer + branch.
        """
        super().__init__()
        drop_threshold(p)
        self.p = p
        self.key = DropoutKey(seed, site)

    def forward(self, x_btd: Tensor, residual_btd: Tensor, rows_bt: Tensor | None = None) -> Tensor:
        """Add [b, t, d] to the residual [b, t, d].

        Args:
            x_btd: output of a layer.
            residual_btd: residual stream.
            rows_bt: int64 numbers of the tokens, unique in the run; may be None if nothing is dropped.

        Raises:
            ConfigError: there are no numbers, but dropout.
        """
        return dropout_add(x_btd, residual_btd, self.p, training=self.training, key=self.key, rows_bt=rows_bt)

    def extra_repr(self) -> str:
        """Return the fields for `repr`."""
        return f"p={self.p}, seed={self.key.seed}, site={self.key.site}"
