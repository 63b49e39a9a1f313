"""Agree on one plan across all ranks: exchange their nodes and plan fingerprints."""

from __future__ import annotations

from collections import Counter

from meshwright.comm.collectives import all_gather_object
from meshwright.comm.node_topology import host_identity, node_numbers
from meshwright.errors import LayoutError
from meshwright.plan.compare import differences, hashes
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json, to_json


def shared_nodes(num_ranks: int) -> int | tuple[int, ...] | None:
    """Return the mapping of ranks to nodes in plan format: consecutive ranks per node, or the node of each rank.

    Return None for a single rank. Collective: all ranks must call it.
    """
    if num_ranks == 1:
        return None
    nodes = tuple(node_numbers(all_gather_object(host_identity())))
    sizes = set(Counter(nodes).values())
    size = next(iter(sizes))
    is_even = len(sizes) == 1 and all(node == rank // size for rank, node in enumerate(nodes))
    return size if is_even else nodes


def agree_on_plan(plan: RunPlan) -> None:
    """Check that all ranks have the same plan. Collective: all ranks must call it.

    Raises:
        LayoutError: two plans differ; raised on all ranks, naming the first field that differs.
    """
    fingerprints = all_gather_object(hashes(plan).fingerprint)
    other = next((rank for rank, one in enumerate(fingerprints) if one != fingerprints[0]), None)
    if other is None:
        return
    texts = all_gather_object(to_json(plan))
    first, second = (from_json(texts[rank], where=f"the plan of rank {rank}") for rank in (0, other))
    difference = differences(first, second)[0]
    raise LayoutError(
        f"ranks 0 and {other} have different plans: {difference}",
        where=f"rank {other}, {difference.path}",
        rule="all ranks run the same plan",
        fix="the same configuration, plan file, schedule file and version of Meshwright on every node",
    )
