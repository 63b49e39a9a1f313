"""Node topology of a group of ranks: intra-node and inter-node peers, and the plan of a two-stage reduction.

Links between nodes are many times slower than links inside a node. So a group of N · L ranks, L on each of N nodes,
reduces inside the nodes first and sends only the sums between nodes: 1/L of the bytes of an all-to-all over the full
group (qgZ of ZeRO++; Wang et al. 2023, section 3.3). A node is a host as NCCL identifies it, never a device count.

This file computes plans over global ranks only; `node_groups` detects the hosts and creates the process groups, and
`two_stage_reduce_scatter` communicates.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that distinguishes hosts with the same name."""


@dataclass(frozen=True)
class Links:
    """Number of a rank's peers in a group, by type of link."""

    inside: int = 0
    """Peers on the same node."""
    between: int = 0
    """Peers on other nodes."""
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        """Size of the group, including this rank."""
        return 1 + self.inside + self.between

    def crossing(self, num_bytes: int) -> int:
        """Return the mean inter-node bytes per rank, if each rank sends `num_bytes` on a ring leaving nodes once."""
        return num_bytes * self.num_nodes // self.num_ranks if self.num_nodes > 1 else 0


@dataclass(frozen=True)
class TwoStagePlan:
    """Communication plan of a two-stage reduce-scatter over N · L ranks, L on each of N nodes.

    First the ranks of each node exchange shards, and each rank sums the N shards it will forward. Then ranks with the
    same local index on their nodes exchange these sums. Groups list their ranks in ascending order, like process
    groups, and shards are in the order of the ranks that receive them.
    """

    ranks: tuple[int, ...]
    """Global ranks in group order, which is also the order of the shards."""
    inside: tuple[tuple[int, ...], ...]
    """Groups of the first stage, [N, L]: the ranks of each node."""
    between: tuple[tuple[int, ...], ...]
    """Groups of the second stage, [L, N]: the ranks with each local index."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return len(self.inside)

    @property
    def num_local(self) -> int:
        """Number of ranks per node, L."""
        return len(self.between)

    def intra_node_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the first-stage group of `rank`."""
        return next(ranks for ranks in self.inside if rank in ranks)

    def inter_node_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the second-stage group of `rank`."""
        return next(ranks for ranks in self.between if rank in ranks)

    def send_order(self) -> tuple[int, ...]:
        """Return shard indices in send order, N for each rank of the node."""
        return self._shards([rank for ranks in self.between for rank in ranks])

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the N shards that `rank` sums in the first stage, in forwarding order."""
        return self._shards(self.inter_node_ranks(rank))

    def _shards(self, owners: Sequence[int]) -> tuple[int, ...]:
        position = {rank: shard for shard, rank in enumerate(self.ranks)}
        return tuple(position[rank] for rank in owners)


def plan_two_stages(ranks: Sequence[int], nodes: Sequence[int]) -> TwoStagePlan | None:
    """Plan a two-stage reduction over `ranks`, or return None if only one stage is possible or useful.

    One stage is used for a single node, for one rank per node, and for nodes with different numbers of ranks.

    Args:
        ranks: global ranks, in group order.
        nodes: the node of each global rank.
    """
    by_node = _by_node(ranks, nodes)
    sizes = {len(node_ranks) for node_ranks in by_node}
    if len(by_node) < 2 or sizes == {1} or len(sizes) > 1:
        return None
    between = tuple(tuple(sorted(owners)) for owners in zip(*by_node, strict=True))
    return TwoStagePlan(tuple(ranks), by_node, between)


def has_uneven_nodes(ranks: Sequence[int], nodes: Sequence[int]) -> bool:
    """Return whether some nodes have more ranks of the group than others."""
    return len({len(node_ranks) for node_ranks in _by_node(ranks, nodes)}) > 1


def group_links(ranks: Sequence[int], nodes: Sequence[int], *, rank: int) -> Links:
    """Count the intra-node and inter-node peers of `rank` in a group; arguments as in `plan_two_stages`."""
    num_local = sum(nodes[peer] == nodes[rank] for peer in ranks)
    return Links(inside=num_local - 1, between=len(ranks) - num_local, num_nodes=len({nodes[peer] for peer in ranks}))


def node_numbers(hosts: Sequence[str]) -> tuple[int, ...]:
    """Number the hosts in order of first appearance, and return each rank's node number."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)


def host_identity() -> str:
    """Return a unique id of this host, as NCCL does: NCCL_HOSTID if set, else the host name and boot id."""
    configured = os.environ.get("NCCL_HOSTID")
    if configured:
        return configured
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _by_node(ranks: Sequence[int], nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group the ranks by node, in ascending order; nodes are in the order of their first ranks."""
    by_node: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_node.setdefault(nodes[rank], []).append(rank)
    return tuple(map(tuple, by_node.values()))
