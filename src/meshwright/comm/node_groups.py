"""Node detection and process groups for two-stage reductions, created collectively at startup.

All ranks must create process groups in the same order, including ranks that belong to none of them or hold more model
parts than others. So the ranks first exchange the groups that their parts are sharded over, and then all create the
same groups, each only once. Later calls involve no other rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.collectives import all_gather_object, await_ranks, rank
from meshwright.comm.message_format import format_ranks
from meshwright.comm.node_topology import TwoStagePlan, has_uneven_nodes, host_identity, node_numbers, plan_two_stages
from meshwright.comm.private import shard_group
from meshwright.errors import LayoutError
from meshwright.log import get_logger
from meshwright.mesh.process_groups import new_group
from meshwright.units import counted

_log = get_logger(__name__)

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class TwoStageGroups:
    """Plan and process groups of a two-stage reduction on one rank."""

    plan: TwoStagePlan
    inside: ProcessGroup
    between: ProcessGroup
    rank: int
    """Global rank of this process."""


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
            raise LayoutError(
                f"the placement has no model part sharded over {format_ranks(ranks)}",
                where="meshwright.comm.compress, placement",
                rule="process groups are created once at startup, for all model parts on all ranks",
                fix="call place(parts) on all ranks, each with all its parts, after fully_shard",
            )
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
    local = {ranks for part in parts for ranks in _shard_ranks(part)}
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


def _shard_ranks(part: nn.Module) -> Iterable[Ranks]:
    for module in part.modules():
        group = shard_group(module) if isinstance(module, FSDPModule) else None
        if group is not None:
            yield tuple(dist.get_process_group_ranks(group))


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
    if any(rank_nodes != nodes for rank_nodes in configured):
        raise _error("ranks were given different nodes", "pass the same nodes on every rank")
    if nodes is None:
        return node_numbers(hosts)
    if len(nodes) != len(hosts):
        what = f"nodes for {counted(len(nodes), 'rank')} were given to {counted(len(hosts), 'rank')}"
        raise _error(what, "pass one node per rank, or None")
    return tuple(nodes)


def _error(what: str, fix: str) -> LayoutError:
    return LayoutError(
        what, where="meshwright.comm.place, nodes", rule="nodes lists the node of each rank of the world", fix=fix
    )
