"""Parameters shared between pipeline stages, with the stages that hold a replica and its name on each.

A tied word embedding is on the first and the last stage; the conditioning embedders of a diffusion transformer are on
all stages. The model declares shared parameters explicitly; they are never inferred from names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedParameter:
    """Parameter replicated on several stages."""

    key: str
    """Name in the full model."""
    sites: tuple[tuple[int, str], ...]
    """Stages that hold a replica and its qualified name in each stage's module, lowest stage first."""

    def stages(self) -> tuple[int, ...]:
        """Return the stages that hold a replica."""
        return tuple(stage for stage, _ in self.sites)


def stage_groups(shared: Iterable[SharedParameter]) -> tuple[tuple[int, ...], ...]:
    """Return the distinct sets of stages that share parameters; a table syncs each set once."""
    return tuple(sorted({parameter.stages() for parameter in shared if len(parameter.sites) > 1}))
