"""Where the ranks of a world are, and the process groups of reductions in two stages: made at start, by all ranks.

Process groups have to be made by all ranks of the world in one order, also by those that are in none of them and those
that hold more parts of a model than others. So all ranks tell each other first which groups their parts are sharded
over, and then all make the same ones, each once, however many modules use it. What follows needs no other rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.collectives import all_gather_object, rank
from meshwright.comm.message_format import ranks_words
from meshwright.comm.node_topology import TwoStages, host_identity, is_uneven, node_numbers, two_stages
from meshwright.comm.private import shard_group
from meshwright.errors import LayoutError
from meshwright.log import get_logger
from meshwright.mesh.process_groups import new_group

_log = get_logger(__name__)

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """A reduction in two stages, as one rank takes part in it."""

    plan: TwoStages
    inside: ProcessGroup
    between: ProcessGroup
    rank: int
    """This process's, in the world."""


@dataclass(frozen=True)
class Placement:
    """The node of each rank of the world, and how each group that a part is sharded over reduces."""

    nodes: tuple[int, ...]
    by_ranks: Mapping[Ranks, Stages | None]
    """By the ranks of a group; None for one stage."""

    def stages_of(self, group: ProcessGroup) -> Stages | None:
        """How `group` reduces in two stages; None where it takes one.

        Raises:
            LayoutError: it is no group of a part that this was made for.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self.by_ranks:
            raise LayoutError(
                f"the placement knows no part of a model that is sharded over {ranks_words(ranks)}",
                where="meshwright.comm.compress, placement",
                rule="process groups are made at start, for all parts of all ranks at once",
                fix="place(parts) on all ranks, each with all its parts, after fully_shard",
            )
        return self.by_ranks[ranks]


def place(
    parts: Iterable[nn.Module], *, nodes: Sequence[int] | None = None, timeout_s: float | None = None
) -> Placement:
    """Find out where all ranks are, and make the process groups that reductions in two stages need.

    All ranks of the world call it, once; what it gives is for `compress` of each part.

    Args:
        parts: the models, or parts of one, that this rank holds, with `fully_shard` applied. A rank may have none.
        nodes: the node of each rank of the world, instead of the hosts that they are on; the same on all ranks.
        timeout_s: seconds a collective of the groups may take; PyTorch's default if not given.

    Raises:
        LayoutError: `nodes` does not fit the world.
    """
    own = {ranks for part in parts for ranks in _shard_ranks(part)}
    everyone = all_gather_object((host_identity(), None if nodes is None else list(nodes), sorted(own)))
    where = _nodes([host for host, _, _ in everyone], [given for _, given, _ in everyone])
    plans = {ranks: two_stages(ranks, where) for ranks in sorted({one for *_, found in everyone for one in found})}
    wanted = sorted({one for plan in plans.values() if plan is not None for one in (*plan.inside, *plan.between)})
    groups = {ranks: new_group(ranks, timeout_s=timeout_s) for ranks in wanted}
    for ranks, plan in plans.items():
        if plan is None and is_uneven(ranks, where) and rank() == ranks[0]:
            _log.warning(
                "%s reduce gradients in one stage, not inside nodes and then between them: their nodes %s have not "
                "equally many of them", ranks_words(ranks), [where[one] for one in ranks],
            )  # fmt: skip
    return Placement(where, {ranks: _stages(plans[ranks], groups) for ranks in own})


def _shard_ranks(part: nn.Module) -> Iterable[Ranks]:
    for module in part.modules():
        group = shard_group(module) if isinstance(module, FSDPModule) else None
        if group is not None:
            yield tuple(dist.get_process_group_ranks(group))


def _stages(plan: TwoStages | None, groups: Mapping[Ranks, ProcessGroup | None]) -> Stages | None:
    if plan is None:
        return None
    me = rank()
    inside, between = groups[plan.inside_of(me)], groups[plan.between_of(me)]
    assert inside is not None and between is not None, "this rank is in its own groups"
    return Stages(plan, inside, between, me)


def _nodes(hosts: Sequence[str], given: Sequence[list[int] | None]) -> Ranks:
    """The node of each rank: what all were given, or their hosts. Every rank sees the same, and raises alike."""
    nodes = given[0]
    if any(one != nodes for one in given):
        raise _error("ranks were given different nodes", "the same nodes on every rank")
    if nodes is None:
        return node_numbers(hosts)
    if len(nodes) != len(hosts):
        raise _error(f"{len(nodes)} nodes were given for {len(hosts)} ranks", f"a list of {len(hosts)} nodes, or None")
    return tuple(nodes)


def _error(what: str, fix: str) -> LayoutError:
    return LayoutError(
        what, where="meshwright.comm.place, nodes", rule="nodes has the node of each rank of the world", fix=fix
    )
