"""Time and memory costs of pipeline stages and of the edges between them.

All times share one arbitrary unit, which simulated times inherit. Measured costs are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import ScheduleError


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    """Time of the weight gradients; a full backward takes `backward_input + backward_weight`."""
    recompute: float = 0.0
    """Time to recompute the forward at the start of the backward."""
    activation_bytes: int = 0
    """Activations saved by the forward for the backward."""
    retained_bytes: int | None = None
    """Activations kept between I and W; None means all of `activation_bytes`."""
    recompute_bytes: int = 0
    """Additional bytes live while the backward runs."""
    buffer_bytes: int = 0
    """Size of the receive buffer of an input, and of an output gradient."""
    parameter_bytes: int = 0
    """Unsharded parameters, held between UNSHARD and RESHARD."""


@dataclass(frozen=True)
class EdgeCosts:
    """Cost of a transfer between two adjacent stages, in either direction."""

    latency: float = 0.0
    bytes_sent: int = 0
    bytes_per_time: float = float("inf")

    def time(self) -> float:
        """Return the time from the start of a transfer to its arrival."""
        return self.latency + self.bytes_sent / self.bytes_per_time


@dataclass(frozen=True)
class Costs:
    """Costs per stage and per edge; a single entry applies to all."""

    stages: Sequence[StageCosts]
    edges: Sequence[EdgeCosts] = (EdgeCosts(),)
    """Edge s connects stages s and s+1. Transfers between stages on the same rank are free."""

    @staticmethod
    def uniform(
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        activation_bytes: int = 1,
        retained_bytes: int | None = None,
        edge: EdgeCosts = EdgeCosts(),
    ) -> Costs:
        """Return equal costs for all stages and edges."""
        stage = StageCosts(
            forward, backward_input, backward_weight, activation_bytes=activation_bytes, retained_bytes=retained_bytes
        )
        return Costs((stage,), (edge,))

    def stage(self, stage: int) -> StageCosts:
        """Return the costs of one stage."""
        return self.stages[stage if len(self.stages) > 1 else 0]

    def edge(self, stage: int) -> EdgeCosts:
        """Return the costs of the edge after `stage`."""
        return self.edges[stage if len(self.edges) > 1 else 0]

    def check(self, num_stages: int) -> None:
        """Check that the number of entries matches the number of stages and edges.

        Raises:
            ScheduleError: the numbers do not match.
        """
        for name, entries, expected in (("stages", self.stages, num_stages), ("edges", self.edges, num_stages - 1)):
            if len(entries) not in (1, expected):
                raise ScheduleError(
                    f"costs of {len(entries)} {name} for a table with {expected}",
                    rule=f"costs have one entry per {name.removesuffix('s')}, or a single entry for all",
                    fix=f"pass {expected} entries",
                )
