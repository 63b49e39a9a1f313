"""Run the processes of a proof, by names that the launcher knows without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.prove.spec import ProofSpec
    from meshwright.train.launch.rank_context import RankContext

PRELOAD = ("meshwright.prove.conclude",)
"""Modules that every process of a proof needs: imported once, before the processes are forked."""


def record_body(context: RankContext, spec: ProofSpec) -> None:
    """Run one rank of the layout under test."""
    from meshwright.prove.conclude import record_layout

    record_layout(context, spec)


def compare_body(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference and compare the results."""
    from meshwright.prove.conclude import compare_with_reference

    compare_with_reference(context, spec)


def locate_body(context: RankContext, spec: ProofSpec) -> None:
    """Run one rank of the second pass."""
    from meshwright.prove.conclude import trace_on_ranks

    trace_on_ranks(context, spec)


def locate_compare_body(context: RankContext, spec: ProofSpec) -> None:
    """Compare the second pass with the reference."""
    from meshwright.prove.conclude import trace_with_reference

    trace_with_reference(context, spec)
