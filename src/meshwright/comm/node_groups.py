"""Node topology of a group of ranks, and the process groups of two-stage reductions, created collectively at startup.

Links between nodes are many times slower than links inside a node. So a group of N · L ranks, L on each of N nodes,
reduces inside the nodes first and sends only the sums between nodes: 1/L of the bytes of an all-to-all over the full
group (qgZ of ZeRO++; Wang et al. 2023, section 3.3). A node is a host as NCCL identifies it, never a device count.

All ranks must create process groups in the same order, including ranks that belong to none of them or hold more model
parts than others. So the ranks first exchange the groups that their parts are sharded over, and then all create the
same groups, each only once. Later calls involve no other rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.collective_log import format_ranks
from meshwright.comm.collectives import all_gather_object, await_ranks, rank
from meshwright.comm.private import shard_group
from meshwright.errors import LayoutError
from meshwright.log import get_logger
from meshwright.mesh.process_groups import new_group
from meshwright.units import counted

_log = get_logger(__name__)
Ranks = tuple[int, ...]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that distinguishes hosts with the same name."""


@dataclass(frozen=True)
class Links:
    """Number of a rank's peers in a group, by type of link."""

    inside: int = 0
    between: int = 0
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
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
    for member in sorted(ranks):
        by_node.setdefault(nodes[member], []).append(member)
    return tuple(map(tuple, by_node.values()))


@dataclass(frozen=True)
class TwoStageGroups:
    """Plan and process groups of a two-stage reduction on one rank."""

    plan: TwoStagePlan
    inside: ProcessGroup
    between: ProcessGroup
    rank: int


@dataclass(frozen=True)
class Placement:
    """Node of each global rank, and the two-stage groups of each shard group."""

    nodes: tuple[int, ...]
    by_ranks: Mapping[Ranks, TwoStageGroups | None]
    """Two-stage groups by the ranks of the shard group; None if it reduces in one stage."""

    def two_stage_groups(self, group: ProcessGroup) -> TwoStageGroups | None:
        """Return the two-stage groups of the shard group `group`; None if it reduces in one stage.

        Raises:
            LayoutError: no model part passed to `place` is sharded over `group`.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self.by_ranks:
            what = f"the placement has no model part sharded over {format_ranks(ranks)}"
            rule = "process groups are created once at startup, for all model parts on all ranks"
            fix = "call place(parts) on all ranks, each with all its parts, after fully_shard"
            raise LayoutError(what, where="meshwright.comm.compress, placement", rule=rule, fix=fix)
        return self.by_ranks[ranks]


def place(
    parts: Iterable[nn.Module], *, nodes: Sequence[int] | None = None, timeout_s: float | None = None
) -> Placement:
    """Detect the node of each rank, and create the process groups that two-stage reductions need.

    All ranks must call this once; pass the result to `compress` for each part.

    Args:
        parts: this rank's models or model parts, with `fully_shard` applied; may be empty.
        nodes: node of each global rank, the same on all ranks; detected from the hosts if None.
        timeout_s: timeout of the groups' collectives in seconds; PyTorch's default if None.

    Raises:
        LayoutError: `nodes` does not match the world size or differs between ranks.
        CollectiveError: another rank does not call this within the timeout of the default group.
    """
    await_ranks("compress or place")
    modules = (module for part in parts for module in part.modules() if isinstance(module, FSDPModule))
    sharded = (group for module in modules if (group := shard_group(module)) is not None)
    local = {tuple(dist.get_process_group_ranks(group)) for group in sharded}
    gathered = all_gather_object((host_identity(), None if nodes is None else list(nodes), sorted(local)))
    node_of = _nodes([host for host, _, _ in gathered], [configured for _, configured, _ in gathered])
    shard_groups = sorted({ranks for *_, remote in gathered for ranks in remote})
    plans = {ranks: plan_two_stages(ranks, node_of) for ranks in shard_groups}
    needed = sorted({ranks for plan in plans.values() if plan is not None for ranks in (*plan.inside, *plan.between)})
    groups = {ranks: new_group(ranks, timeout_s=timeout_s) for ranks in needed}
    for ranks, plan in plans.items():
        if plan is None and has_uneven_nodes(ranks, node_of) and rank() == ranks[0]:
            _log.warning(
                "%s reduce gradients in one stage instead of inside nodes first: their nodes %s hold different numbers "
                "of them", format_ranks(ranks), [node_of[rank] for rank in ranks],
            )  # fmt: skip
    return Placement(node_of, {ranks: _open_groups(plans[ranks], groups) for ranks in local})


def _open_groups(plan: TwoStagePlan | None, groups: Mapping[Ranks, ProcessGroup | None]) -> TwoStageGroups | None:
    if plan is None:
        return None
    me = rank()
    inside, between = groups[plan.intra_node_ranks(me)], groups[plan.inter_node_ranks(me)]
    assert inside is not None and between is not None, "this rank is in its own groups"
    return TwoStageGroups(plan, inside, between, me)


def _nodes(hosts: Sequence[str], configured: Sequence[list[int] | None]) -> Ranks:
    """Return the configured node of each rank, or number the hosts. All ranks raise the same error."""
    nodes = configured[0]
    differ = any(rank_nodes != nodes for rank_nodes in configured)
    if nodes is None and not differ:
        return node_numbers(hosts)
    if nodes is None or differ or len(nodes) != len(hosts):
        what, fix = "ranks were given different nodes", "pass the same nodes on every rank"
        if nodes is not None and not differ:
            what = f"nodes for {counted(len(nodes), 'rank')} were given to {counted(len(hosts), 'rank')}"
            fix = "pass one node per rank, or None"
        rule = "nodes lists the node of each rank of the world"
        raise LayoutError(what, where="meshwright.comm.place, nodes", rule=rule, fix=fix)
    return tuple(nodes)
