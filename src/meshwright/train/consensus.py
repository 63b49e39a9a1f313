"""One plan on all ranks: the nodes that they are on, and the fingerprints of what each is about to run."""

from __future__ import annotations

from collections import Counter

from meshwright.comm.collectives import all_gather_object
from meshwright.comm.node_topology import host_identity, node_numbers
from meshwright.errors import LayoutError
from meshwright.plan.compare import differences, hashes
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json, to_json


def shared_nodes(num_ranks: int) -> int | tuple[int, ...] | None:
    """Where the ranks of a process group are, as plans say it: neighbours on a node, or the node of each rank.

    None for one rank. All ranks call it.
    """
    if num_ranks == 1:
        return None
    nodes = tuple(node_numbers(all_gather_object(host_identity())))
    sizes = set(Counter(nodes).values())
    size = next(iter(sizes))
    is_even = len(sizes) == 1 and all(node == rank // size for rank, node in enumerate(nodes))
    return size if is_even else nodes


def agree_on_plan(plan: RunPlan) -> None:
    """See that all ranks have the same plan. All ranks call it.

    Raises:
        LayoutError: two have not, with the first field that differs; on all ranks alike.
    """
    fingerprints = all_gather_object(hashes(plan).fingerprint)
    other = next((rank for rank, found in enumerate(fingerprints) if found != fingerprints[0]), None)
    if other is None:
        return
    texts = all_gather_object(to_json(plan))
    first, second = (from_json(texts[rank], where=f"the plan of rank {rank}") for rank in (0, other))
    found = differences(first, second)[0]
    raise LayoutError(
        f"ranks 0 and {other} have different plans: {found}",
        where=f"rank {other}, {found.path}",
        rule="all ranks run one plan",
        fix="the same configuration, plan file, schedule file and version of Meshwright on every node",
    )
