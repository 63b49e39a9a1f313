"""Bytes that one rank sends in a step of training, by what for and over which links, predicted from the config alone.

With what the section `comm` asks for, and as it would be without. Validations, samples and checkpoints come on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.config.schema import CommConfig, RunConfig
from meshwright.plan.messages import Message, Place, What, messages, place_of


@dataclass(frozen=True)
class LinkBytes:
    """By where they go."""

    inside_node: int = 0
    between_nodes: int = 0

    def total(self) -> int:
        """To other ranks, wherever they are."""
        return self.inside_node + self.between_nodes

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.inside_node + other.inside_node, self.between_nodes + other.between_nodes)

    def __mul__(self, times: int) -> LinkBytes:
        return LinkBytes(self.inside_node * times, self.between_nodes * times)


@dataclass(frozen=True)
class TrafficEntry:
    """What is sent for one thing."""

    what: What
    sent: LinkBytes
    exact: LinkBytes
    """The same without compression."""


@dataclass(frozen=True)
class Traffic:
    """What one rank sends."""

    rank: int
    entries: tuple[TrafficEntry, ...]
    """Of what is sent at all."""

    def sent(self) -> LinkBytes:
        """Everything."""
        return sum((entry.sent for entry in self.entries), LinkBytes())

    def exact(self) -> LinkBytes:
        """Everything, without compression."""
        return sum((entry.exact for entry in self.entries), LinkBytes())

    def of(self, what: What) -> TrafficEntry:
        """What is sent for one thing, which may be nothing."""
        found = (entry for entry in self.entries if entry.what is what)
        return next(found, TrafficEntry(what, LinkBytes(), LinkBytes()))

    def over(self, num_steps: int) -> Traffic:
        """The same of several steps."""
        entries = (TrafficEntry(one.what, one.sent * num_steps, one.exact * num_steps) for one in self.entries)
        return Traffic(self.rank, tuple(entries))


def predict_traffic(config: RunConfig, *, rank: int | None = None, ranks_per_node: int | None = None) -> Traffic:
    """Predict what a rank sends in a step.

    Args:
        config: of the run.
        rank: of the mesh; None for the one that sends most. Ranks of a stage send alike, so that is the first of one.
        ranks_per_node: neighbouring ranks on a machine, where `comm.ranks_per_node` does not say; None for all.
    """
    num_ranks = config.mesh.axes().num_ranks()
    candidates = range(0, num_ranks, num_ranks // config.mesh.pp) if rank is None else (rank,)
    found = [_of_rank(config, candidate, ranks_per_node) for candidate in candidates]
    return max(found, key=lambda traffic: traffic.sent().total())


def _of_rank(config: RunConfig, rank: int, ranks_per_node: int | None) -> Traffic:
    # The secondary shards stay: they change where weights come from, and no digit of them.
    kept = config.comm.model_dump(include={"secondary_shards", "ranks_per_node"})
    exact = config.model_copy(update={"comm": CommConfig(**kept)})
    place, without = (place_of(one, rank, ranks_per_node=ranks_per_node) for one in (config, exact))
    sent, as_it_is = _by_what(place, messages(place)), _by_what(without, messages(without))
    entries = (TrafficEntry(what, sent[what], as_it_is[what]) for what in What)
    return Traffic(rank, tuple(entry for entry in entries if entry.sent.total()))


def _by_what(place: Place, found: Iterable[Message]) -> dict[What, LinkBytes]:
    totals = dict.fromkeys(What, LinkBytes())
    for message in found:
        totals[message.what] += _by_link(place, message)
    return totals


def _by_link(place: Place, message: Message) -> LinkBytes:
    nodes = [place.node(peer) for peer in message.peers]
    total, near = len(nodes) * message.num_bytes, nodes.count(place.node(place.rank))
    far = total - near * message.num_bytes
    if message.in_ring and far:
        far = total * len({*nodes, place.node(place.rank)}) // (len(nodes) + 1)
    return LinkBytes(total - far, far)
