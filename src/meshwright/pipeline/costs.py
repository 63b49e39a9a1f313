"""What the stages of a pipeline and the edges between them cost: times and bytes, as values.

Times are in any one unit, which the simulated times then have; measured ones are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import ScheduleError


@dataclass(frozen=True)
class StageCosts:
    """One stage and one micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    """A backward that isn't split takes the sum of the two."""
    recompute: float = 0.0
    """Time that a backward first takes to compute the forward again."""
    activation_bytes: int = 0
    """Saved by the forward until its backward."""
    retained_bytes: int | None = None
    """Kept from the gradient of the inputs to that of the weights; None: all of `activation_bytes`."""
    recompute_bytes: int = 0
    """Comes on top while the backward runs."""
    buffer_bytes: int = 0
    """Of a received input, and of a received gradient of the output."""
    parameter_bytes: int = 0
    """Gathered between UNSHARD and RESHARD."""


@dataclass(frozen=True)
class EdgeCosts:
    """What a transfer between two neighbouring stages takes, in each direction."""

    latency: float = 0.0
    bytes_sent: int = 0
    bytes_per_time: float = float("inf")

    def time(self) -> float:
        """From the start of a transfer to its arrival."""
        return self.latency + self.bytes_sent / self.bytes_per_time


@dataclass(frozen=True)
class Costs:
    """Per stage and per edge; a single entry stands for all."""

    stages: Sequence[StageCosts]
    edges: Sequence[EdgeCosts] = (EdgeCosts(),)
    """Edge s lies between the stages s and s+1. Stages on one rank hand over for nothing."""

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
        """All stages alike."""
        stage = StageCosts(
            forward, backward_input, backward_weight, activation_bytes=activation_bytes, retained_bytes=retained_bytes
        )
        return Costs((stage,), (edge,))

    def stage(self, stage: int) -> StageCosts:
        """Those of one stage."""
        return self.stages[stage if len(self.stages) > 1 else 0]

    def edge(self, stage: int) -> EdgeCosts:
        """Those of the edge after `stage`."""
        return self.edges[stage if len(self.edges) > 1 else 0]

    def check(self, num_stages: int) -> None:
        """See that there is an entry for every stage and edge.

        Raises:
            ScheduleError: there is another number of them.
        """
        for name, found, wanted in (("stages", self.stages, num_stages), ("edges", self.edges, num_stages - 1)):
            if len(found) not in (1, wanted):
                raise ScheduleError(
                    f"costs of {len(found)} {name} for a table with {wanted}",
                    rule=f"an entry for each of the {name}, or one for all",
                    fix=f"{wanted} entries",
                )
