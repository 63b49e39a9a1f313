"""Load a configuration and check all rules, including those of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.config import load as config_load
from meshwright.config.schema import RunConfig
from meshwright.plan.rules import violations


def load(
    source: str | None, overrides: Sequence[str] = (), *, defaults: Sequence[str] = (), num_ranks: int | None = None
) -> RunConfig:
    """Load a preset or a file, apply overrides and check all rules; takes the arguments of `config.load.load`.

    Raises:
        ConfigError: a preset, family or key is unknown, or a value is invalid.
        LayoutError: the mesh, batch or stages do not fit.
    """
    return config_load.load(source, overrides, defaults=defaults, num_ranks=num_ranks, rules=violations)
