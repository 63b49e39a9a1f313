"""A run's configuration from a preset or a file and words, checked against every rule."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.config import load as config_load
from meshwright.config.schema import RunConfig
from meshwright.plan.rules import violations


def load(
    source: str | None, overrides: Sequence[str] = (), *, defaults: Sequence[str] = (), num_ranks: int | None = None
) -> RunConfig:
    """Read a preset or a file, apply the command line's words, and check them; arguments as of `config.load.load`.

    Raises:
        ConfigError: an unknown preset, family, key or type; LayoutError: a mesh, a batch or stages that do not fit.
    """
    return config_load.load(source, overrides, defaults=defaults, num_ranks=num_ranks, rules=violations)
