"""Predict the bytes that a rank sends per training step, by purpose and link type.

Counted both with the plan's codecs and without compression. Excludes validation, sampling and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.plan.collective_bytes import Message, Purpose, context_bytes, messages
from meshwright.plan.matrix_owners import bytes_moved_by_rank
from meshwright.plan.run_plan import RunPlan


@dataclass(frozen=True)
class LinkBytes:
    """Number of bytes by link type."""

    inside_node: int = 0
    between_nodes: int = 0

    def total(self) -> int:
        """Return the bytes sent to all other ranks."""
        return self.inside_node + self.between_nodes

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.inside_node + other.inside_node, self.between_nodes + other.between_nodes)

    def __mul__(self, times: int) -> LinkBytes:
        return LinkBytes(self.inside_node * times, self.between_nodes * times)


@dataclass(frozen=True)
class TrafficEntry:
    """Bytes sent for one purpose."""

    purpose: str
    """A `Purpose`, or the purpose of one of the plan's collectives."""
    sent: LinkBytes
    exact: LinkBytes
    """Bytes without compression."""


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank."""

    rank: int
    entries: tuple[TrafficEntry, ...]
    """Entries for all purposes with nonzero traffic."""

    def sent(self) -> LinkBytes:
        """Return the total."""
        return sum((entry.sent for entry in self.entries), LinkBytes())

    def exact(self) -> LinkBytes:
        """Return the total without compression."""
        return sum((entry.exact for entry in self.entries), LinkBytes())

    def of(self, purpose: str) -> TrafficEntry:
        """Return the entry for a purpose, zero if nothing is sent for it."""
        found = (entry for entry in self.entries if entry.purpose == purpose)
        return next(found, TrafficEntry(purpose, LinkBytes(), LinkBytes()))

    def over(self, num_steps: int) -> Traffic:
        """Return the traffic of `num_steps` steps."""
        entries = (TrafficEntry(one.purpose, one.sent * num_steps, one.exact * num_steps) for one in self.entries)
        return Traffic(self.rank, tuple(entries))


def predict_traffic(plan: RunPlan, *, rank: int | None = None) -> Traffic:
    """Predict the bytes that a rank sends in a step.

    Args:
        plan: plan of the run.
        rank: rank on the mesh; None for the rank that sends the most. Ranks of a stage send the same number of bytes,
            except for attention along cp and for updates from whole matrices, so few ranks of each are considered.
    """
    num_ranks = plan.mesh.num_ranks()
    firsts = range(0, num_ranks, num_ranks // plan.mesh.size("pp"))
    candidates = [one for first in firsts for one in _busiest(plan, first)] if rank is None else [rank]
    found = [_rank_traffic(plan, candidate) for candidate in candidates]
    return max(found, key=lambda traffic: traffic.sent().total())


def _busiest(plan: RunPlan, first: int) -> set[int]:
    """Return the rank along cp whose attention sends the most, and the rank that sends the most for updates."""
    moved = bytes_moved_by_rank(plan, plan.mesh.position(first, "pp"))
    along_cp = max(plan.mesh.line(first, plan.mesh.view("cp")), key=lambda rank: context_bytes(plan, rank))
    return {along_cp, max(moved, key=lambda rank: moved[rank], default=along_cp)}


def _rank_traffic(plan: RunPlan, rank: int) -> Traffic:
    sent, exact = (_by_purpose(plan, rank, messages(plan, rank, exact=exact)) for exact in (False, True))
    entries = (TrafficEntry(purpose, sent[purpose], exact[purpose]) for purpose in sent)
    return Traffic(rank, tuple(entry for entry in entries if entry.sent.total()))


def _by_purpose(plan: RunPlan, rank: int, found: Iterable[Message]) -> dict[str, LinkBytes]:
    totals: dict[str, LinkBytes] = dict.fromkeys(Purpose, LinkBytes())
    for message in found:
        totals[message.purpose] = totals.get(message.purpose, LinkBytes()) + by_link(plan, rank, message)
    return totals


def by_link(plan: RunPlan, rank: int, message: Message) -> LinkBytes:
    """Return the bytes of a message to all its peers, by link."""
    home, nodes = plan.mesh.node(rank), [plan.mesh.node(peer) for peer in message.peers]
    total, near = len(nodes) * message.num_bytes, nodes.count(home)
    far = total - near * message.num_bytes
    if message.in_ring and far:
        far = total * len({*nodes, home}) // (len(nodes) + 1)
    return LinkBytes(total - far, far)
