"""Times of collectives on a cluster, by a latency per step and the bytes over the slowest link. Doesn't import torch.

A group has a shape: how many of its ranks share a node, how many of its nodes share a pod, and how many pods it spans.
The rules are those by which NCCL chooses its algorithms (NVIDIA/nccl src/graph/tuning.cc; Thakur, Rabenseifner and
Gropp 2005 for rings and trees):

- A ring over n ranks moves a share 1/n per step, in one step fewer than it has ranks for an all-gather or a
  reduce-scatter and twice as many for an all-reduce. One step per node boundary has the latency of the network.
- NCCL builds as many rings as a node has ranks of the group, each through another network port, so the bandwidth
  between nodes is that of all of them. Groups that share a node, such as those of FSDP with tensor parallelism inside
  nodes, have ports of their own: each device has one.
- Inside a node a ring uses every port that leads to another rank of the group.
- An all-reduce goes over a double binary tree instead if that is faster: its latency grows with the logarithm of the
  number of nodes, and it achieves 90 % of the ring's bandwidth.
- In an all-to-all every rank sends to each other rank through its own port; what stays inside nodes and what leaves
  them overlap, and each peer costs a step.
- Processes on CPUs share cores: with more processes than cores, each step waits for its turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwright.cluster.hardware import Cluster, Level

TREE_BANDWIDTH = 0.9
"""Share of a ring's bandwidth that a tree achieves (NCCL, tuning.cc)."""


class CollectiveOp(StrEnum):
    """Kind of a collective. The bytes are those of the full tensor; of an all-to-all, those that each rank sends, its
    own part included; of a message, those of the message."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"


@dataclass(frozen=True)
class GroupShape:
    """How the ranks of a group are spread over a cluster, evenly."""

    inside: int
    """Ranks of the group on a node."""
    nodes: int = 1
    """Nodes of a pod with ranks of the group."""
    pods: int = 1

    @property
    def num_ranks(self) -> int:
        return self.inside * self.nodes * self.pods

    def steps(self) -> dict[Level, int]:
        """Return the hops of a ring by level, one fewer than it has ranks."""
        inside, nodes, pods = self.inside, self.nodes, self.pods
        between = pods * (nodes - 1)
        counts = (pods * nodes * (inside - 1), between, pods - 1)
        return {level: count for level, count in zip(Level, counts, strict=True) if count}


def group_shape(cluster: Cluster, ranks: Iterable[int]) -> GroupShape:
    """Return the shape of a group of global ranks; of an uneven one, that of its fullest node and pod."""
    on_node = Counter(rank // cluster.devices_per_node for rank in set(ranks))
    in_pod = Counter(0 if cluster.nodes_per_pod is None else node // cluster.nodes_per_pod for node in on_node)
    return GroupShape(max(on_node.values()), max(in_pod.values()), len(in_pod))


def collective_us(
    cluster: Cluster,
    op: CollectiveOp | str,
    num_bytes: float,
    group: GroupShape | Sequence[int],
    *,
    concurrent: int = 1,
) -> float:
    """Return the time of a collective in µs; 0 for a group of one rank.

    `group` is the shape of the group or its global ranks. `concurrent` is the number of such groups that communicate at
    once on a node, which matters where processes share cores.
    """
    shape = group if isinstance(group, GroupShape) else group_shape(cluster, group)
    if shape.num_ranks <= 1:
        return 0.0
    op = CollectiveOp(op)
    slower = _oversubscription(cluster, shape, concurrent)
    num_bytes = max(cluster.curve(level).cached(num_bytes) for level in shape.steps())
    if op == CollectiveOp.SEND:
        return slower * _message_us(cluster, num_bytes, list(shape.steps())[-1])
    if op == CollectiveOp.ALL_TO_ALL:
        return slower * _all_to_all_us(cluster, num_bytes, shape)
    if op == CollectiveOp.REDUCE_SCATTER:
        num_bytes *= max(cluster.curve(level).reduce_scatter_slower for level in shape.steps())
    ring = _ring_us(cluster, num_bytes, shape)
    if op == CollectiveOp.ALL_REDUCE:
        return slower * min(2 * ring, _tree_us(cluster, num_bytes, shape))
    return slower * ring


def level_bandwidth(cluster: Cluster, level: Level, shape: GroupShape, num_bytes: float = math.inf) -> float:
    """Return the bytes per µs that a ring achieves on the links of a level, in steps of `num_bytes`."""
    link, curve = cluster.link_at(level), cluster.curve(level)
    others = shape.inside - 1 if level == Level.INSIDE_NODE else 1
    rings = 1 if level == Level.INSIDE_NODE else shape.inside
    achieved = link.bandwidth_bytes_per_s * min(link.ports, max(1, others)) * rings * curve.efficiency / 1e6
    return achieved if math.isinf(num_bytes) else achieved * num_bytes / (num_bytes + curve.half_bytes)


def _ring_us(cluster: Cluster, num_bytes: float, shape: GroupShape) -> float:
    """Return the time of an all-gather, or of a reduce-scatter, over rings."""
    step = num_bytes / shape.num_ranks
    latency = sum(count * cluster.curve(level).latency_us for level, count in shape.steps().items())
    if not num_bytes:
        return latency
    slowest = min(level_bandwidth(cluster, level, shape, step) for level in shape.steps())
    return latency + (shape.num_ranks - 1) * step / slowest


def _tree_us(cluster: Cluster, num_bytes: float, shape: GroupShape) -> float:
    """Return the time of an all-reduce over a double binary tree between nodes, with a chain inside each."""
    hops = {
        Level.INSIDE_NODE: shape.inside - 1,
        Level.BETWEEN_NODES: math.ceil(math.log2(shape.nodes)),
        Level.BETWEEN_PODS: math.ceil(math.log2(shape.pods)),
    }
    latency = 2 * sum(count * cluster.curve(level).latency_us for level, count in hops.items() if count)
    if shape.nodes * shape.pods == 1:
        return math.inf  # inside a node, NCCL's trees are chains: rings with less bandwidth
    step = num_bytes / shape.num_ranks
    slowest = min(level_bandwidth(cluster, level, shape, step) for level in shape.steps()) if num_bytes else math.inf
    return latency + 2 * num_bytes / (slowest * TREE_BANDWIDTH)


def _all_to_all_us(cluster: Cluster, num_bytes: float, shape: GroupShape) -> float:
    peers = (shape.inside - 1, shape.inside * (shape.nodes - 1), shape.inside * shape.nodes * (shape.pods - 1))
    latency, slowest = 0.0, 0.0
    for level, count in zip(Level, peers, strict=True):
        if count:
            curve, link = cluster.curve(level), cluster.link_at(level)
            bandwidth = link.bandwidth_bytes_per_s * min(link.ports, count) * curve.efficiency / 1e6
            latency += count * curve.latency_us
            slowest = max(slowest, count * (num_bytes / shape.num_ranks + curve.half_bytes) / bandwidth)
    return latency + slowest if num_bytes else latency


def _message_us(cluster: Cluster, num_bytes: float, level: Level) -> float:
    link, curve = cluster.link_at(level), cluster.curve(level)
    moved = num_bytes + curve.half_bytes if num_bytes else 0.0
    return curve.latency_us + moved / (link.bandwidth_bytes_per_s * curve.efficiency) * 1e6


def _oversubscription(cluster: Cluster, shape: GroupShape, concurrent: int) -> float:
    """Return how many processes there are for each core: 1 unless the device is a CPU."""
    cores = cluster.performance.cores
    return max(1.0, shape.inside * concurrent / cores) if cores else 1.0
