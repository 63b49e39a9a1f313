"""What a step costs: latency and bandwidth of the slowest mesh axis whose ranks take part.

    time = rounds × latency + max(bytes sent, bytes received) / bandwidth

with the bytes of the rank that has most. All messages of a round are under way at once, so a round pays the latency
once, whatever its kind and however many ranks take part; ports of a link carry different messages. Local steps are
free: what they copy is small beside what a link carries in that time. The figures are the cluster's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cluster.presets import cluster_preset
from meshwright.cluster.spec import Cluster, Link
from meshwright.errors import LayoutError

DEFAULT_CLUSTER = "H100"
"""Whose link inside a node all axes use where no topology is given."""


@dataclass(frozen=True)
class Topology:
    """The link that neighbours along each mesh axis use."""

    links: tuple[Link, ...]

    @staticmethod
    def of(cluster: Cluster, axis_sizes: Sequence[int]) -> Topology:
        """A mesh that fills nodes from its last axis on."""
        spans = [math.prod(axis_sizes[axis:]) for axis in range(len(axis_sizes))]
        return Topology(tuple(cluster.link(span) for span in spans))

    @staticmethod
    def uniform(num_axes: int) -> Topology:
        """The same fast link along every axis."""
        return Topology((cluster_preset(DEFAULT_CLUSTER).inside_node,) * num_axes)

    def check(self, axis_sizes: Sequence[int]) -> None:
        """Raises:
        LayoutError: there is not one link for each of the mesh's axes.
        """
        if len(self.links) != len(axis_sizes):
            raise LayoutError(
                f"a topology of {len(self.links)} links for a mesh of {len(axis_sizes)} axes",
                where="topology",
                rule="one link for each mesh axis",
                fix=f"Topology.of(cluster, {list(axis_sizes)})",
            )

    def bandwidth(self, axes: Sequence[int]) -> float:
        """Bytes a second of a group over `axes`: that of its slowest axis."""
        return min(link.bandwidth_bytes_per_s * link.ports for link in self._of(axes))

    def latency_us(self, axes: Sequence[int]) -> float:
        """Of a group over `axes`: that of its slowest axis."""
        return max(link.latency_us for link in self._of(axes))

    def time_us(self, axes: Sequence[int], num_bytes: float, rounds: int = 1) -> float:
        """Time of an exchange in which the busiest rank sends, or receives, `num_bytes`. Free without axes."""
        if not axes:
            return 0.0
        return rounds * self.latency_us(axes) + num_bytes / self.bandwidth(axes) * 1e6

    def _of(self, axes: Sequence[int]) -> list[Link]:
        return [self.links[axis] for axis in axes]
