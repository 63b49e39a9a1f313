"""Run a rank, by a name that the launcher knows without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.train.launch.rank_context import RankContext
    from meshwright.train.launch.run_spec import RunSpec


def run_body(context: RankContext, spec: RunSpec) -> None:
    """Run one rank."""
    from meshwright.train.rank_run import run_rank

    run_rank(context, spec)
