"""Parameters that are in several places of a pipeline: which stages hold a copy, and under which name.

A tied word embedding is on the first stage and on the last; the embedders that condition a diffusion transformer are
on all of them. The model declares them; nothing is found by matching names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedParameter:
    """One parameter with copies on several stages."""

    key: str
    """Its name in the whole model."""
    sites: tuple[tuple[int, str], ...]
    """Stage and qualified name in that stage's part, the lowest stage first."""

    def stages(self) -> tuple[int, ...]:
        """The stages with a copy."""
        return tuple(stage for stage, _ in self.sites)


def stage_groups(shared: Iterable[SharedParameter]) -> tuple[tuple[int, ...], ...]:
    """The sets of stages that parameters are shared among, each once: a table syncs each of them."""
    return tuple(sorted({parameter.stages() for parameter in shared if len(parameter.sites) > 1}))
