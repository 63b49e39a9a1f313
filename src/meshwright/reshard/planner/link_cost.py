"""Cost model of a step, based on the latency and bandwidth of its slowest mesh axis.

    time = rounds × latency + max(bytes sent, bytes received) / bandwidth

where bytes are maxima over ranks. All messages of a round are in flight at once, so a round pays the latency once,
regardless of its kind and number of ranks. Different messages use different ports of a link. Local steps are free,
since memory copies are fast relative to communication. Latencies and bandwidths come from the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cluster.presets import cluster_preset
from meshwright.cluster.spec import Cluster, Link
from meshwright.errors import LayoutError
from meshwright.units import counted

DEFAULT_CLUSTER = "H100"
"""Cluster that provides the default link: its intra-node link, used for all axes."""


@dataclass(frozen=True)
class Topology:
    """Link between neighbors along each mesh axis."""

    links: tuple[Link, ...]

    @staticmethod
    def of(cluster: Cluster, axis_sizes: Sequence[int]) -> Topology:
        """Return the topology of a mesh on a cluster, with the innermost axes within nodes."""
        spans = [math.prod(axis_sizes[axis:]) for axis in range(len(axis_sizes))]
        return Topology(tuple(cluster.link(span) for span in spans))

    @staticmethod
    def uniform(num_axes: int) -> Topology:
        """Return a topology with the same fast link along every axis."""
        return Topology((cluster_preset(DEFAULT_CLUSTER).inside_node,) * num_axes)

    def check(self, axis_sizes: Sequence[int]) -> None:
        """Raise `LayoutError` unless there is one link per mesh axis."""
        if len(self.links) != len(axis_sizes):
            raise LayoutError(
                f"a topology of {counted(len(self.links), 'link')} for a mesh of {counted(len(axis_sizes), 'axis')}",
                where="topology",
                rule="one link for each mesh axis",
                fix=f"Topology.of(cluster, {list(axis_sizes)})",
            )

    def bandwidth(self, axes: Sequence[int]) -> float:
        """Return the bandwidth of the slowest of `axes`, in bytes per second."""
        return min(link.bandwidth_bytes_per_s * link.ports for link in self._of(axes))

    def latency_us(self, axes: Sequence[int]) -> float:
        """Return the latency of the slowest of `axes`."""
        return max(link.latency_us for link in self._of(axes))

    def time_us(self, axes: Sequence[int], num_bytes: float, rounds: int = 1) -> float:
        """Return the time of an exchange where the busiest rank sends or receives `num_bytes`; 0 without axes."""
        if not axes:
            return 0.0
        return rounds * self.latency_us(axes) + num_bytes / self.bandwidth(axes) * 1e6

    def _of(self, axes: Sequence[int]) -> list[Link]:
        return [self.links[axis] for axis in axes]
