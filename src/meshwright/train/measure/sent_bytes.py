"""Bytes that a rank really sent in a step, by purpose and link, beside those predicted.

What is counted is an operation on a group of ranks; the plan's messages say which purposes have such operations on
that group. Purposes that can't be told apart share an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.run_plan import RunPlan
from meshwright.plan.traffic import LinkBytes, Message, Purpose, by_link, messages, predict_traffic

ALL_TO_ALL, EXCHANGE = "all_to_all", "exchange"
TO_SOME = frozenset({ALL_TO_ALL, EXCHANGE})
"""Operations that may send to some ranks of their group only, and different amounts to each."""
Sent = tuple[str, tuple[int, ...]]
"""Operation, and global ranks of its group."""
RING = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
OPERATIONS: Mapping[str, frozenset[str]] = {
    Purpose.WEIGHTS: frozenset({"all_gather"}),
    Purpose.GRADIENTS: frozenset({"reduce_scatter"}),
    Purpose.REPLICAS: frozenset({"all_reduce"}),
    Purpose.BUFFERS: frozenset({"all_reduce"}),
    Purpose.SHARED: frozenset({"all_reduce"}),
    Purpose.STAGES: frozenset({"send"}),
    Purpose.CONTEXT: frozenset({ALL_TO_ALL}),
    Purpose.OPTIMIZER: frozenset({EXCHANGE}),
    Purpose.EXPERTS: frozenset({ALL_TO_ALL, "all_reduce"}),
}
"""Operations of each purpose; the plan's other purposes have all but sends, all-to-alls and exchanges."""
COMPRESSED = frozenset({Purpose.GRADIENTS, Purpose.WEIGHTS, Purpose.REPLICAS})
"""Purposes that codecs compress, which are counted together."""


@dataclass(frozen=True)
class CountedPurpose:
    """Bytes of one purpose, or of several that can't be told apart, in a step of one rank."""

    purposes: tuple[str, ...]
    counted: LinkBytes
    predicted: LinkBytes


def count_purposes(
    plan: RunPlan, rank: int, sent: Mapping[Sent, int], compressed: LinkBytes | None
) -> list[CountedPurpose]:
    """Assign what a rank sent in a step to purposes.

    Args:
        plan: plan of the run.
        rank: the rank.
        sent: bytes by operation and ranks of the group: to each peer, or in all-to-alls and exchanges to all of them.
        compressed: bytes of compressed collectives; None without compression.

    Returns:
        Entries for all purposes that are predicted or counted, largest first. Bytes of all-to-alls and exchanges are
        split over links as if each peer got the same.
    """
    of_group: dict[tuple[int, ...], set[str]] = {}
    for message in messages(plan, rank):
        if message.peers and message.num_bytes and not (compressed is not None and message.purpose in COMPRESSED):
            of_group.setdefault(tuple(sorted({rank, *message.peers})), set()).add(message.purpose)
    joined: list[set[str]] = [{purpose} for purpose in set().union(*of_group.values())]
    counts: list[tuple[set[str], LinkBytes]] = [] if compressed is None else [(set(COMPRESSED), compressed)]
    joined += [] if compressed is None else [set(COMPRESSED)]
    for (op, ranks), num_bytes in sent.items():
        group = tuple(sorted(ranks))
        found = {purpose for purpose in _purposes(of_group, group, op) if op in OPERATIONS.get(purpose, RING)}
        if not num_bytes or (not found and compressed is not None):
            continue  # compressed collectives use the groups of exact ones
        found = found or {f"{op.replace('_', '-')}s that are not predicted"}
        peers = tuple(other for other in group if other != rank)
        each = num_bytes // len(peers) if op in TO_SOME else num_bytes
        counts.append((found, by_link(plan, rank, Message("", peers, each, in_ring=op in RING))))
        overlapping = [one for one in joined if one & found]
        joined = [one for one in joined if not one & found] + [found.union(*overlapping)]
    predicted = predict_traffic(plan, rank=rank)
    entries = [
        CountedPurpose(
            tuple(sorted(purposes)),
            sum((links for found, links in counts if found <= purposes), LinkBytes()),
            sum((predicted.of(purpose).sent for purpose in purposes), LinkBytes()),
        )
        for purposes in joined
    ]
    return sorted(entries, key=lambda one: -max(one.predicted.total(), one.counted.total()))


def _purposes(of_group: Mapping[tuple[int, ...], set[str]], group: tuple[int, ...], op: str) -> set[str]:
    """Return the purposes of messages in a group; some operations have messages to some of its ranks only."""
    if op not in TO_SOME:
        return of_group.get(group, set())
    return set().union(*(found for ranks, found in of_group.items() if set(ranks) <= set(group)))
