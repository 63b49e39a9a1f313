"""Which node each rank is on, and what follows for a group of ranks: its links, and a reduction in two stages.

Links between nodes are many times slower than those inside. So a group of N · L ranks, L on each of N nodes, reduces
inside the nodes first, and only sums cross between them: 1/L of what an all-to-all of the whole group sends there (qgZ
of ZeRO++; Wang et al. 2023, section 3.3). A node is a host as NCCL tells hosts apart, never so many devices in a row.

Values only, of global ranks; `placement` finds the hosts and makes the process groups, `two_stages` moves the bytes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Tells hosts of one name apart."""


@dataclass(frozen=True)
class Links:
    """The other ranks of a group, as one of them reaches them."""

    inside: int = 0
    """Ranks of its own node."""
    between: int = 0
    """Ranks of other nodes."""
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the group, this one included."""
        return 1 + self.inside + self.between

    def crossing(self, num_bytes: int) -> int:
        """Of what a rank hands on in a ring of the whole group, the bytes that go to another node: the mean over ranks.

        So NCCL reduces and gathers: its rings enter and leave a node once, so one rank of each hands on to another.
        """
        return num_bytes * self.num_nodes // self.num_ranks if self.num_nodes > 1 else 0


@dataclass(frozen=True)
class TwoStages:
    """Who sends what to whom when N · L ranks, L on each of N nodes, reduce-scatter in two stages.

    First each rank sends to every other of its node the pieces that this one will send on, and each sums what it
    receives; then ranks of one index in their nodes send each other these sums. Process groups have their ranks in
    ascending order, and so have these: pieces are in the order of those who get them.
    """

    ranks: tuple[int, ...]
    """The group's, in its order, which is that of the pieces."""
    inside: tuple[tuple[int, ...], ...]
    """The groups of the first stage, [N, L]: the ranks of each node."""
    between: tuple[tuple[int, ...], ...]
    """The groups of the second stage, [L, N]: the ranks of each index in their nodes."""

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.inside)

    @property
    def num_local(self) -> int:
        """L."""
        return len(self.between)

    def inside_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` exchanges pieces with in the first stage, itself included."""
        return next(ranks for ranks in self.inside if rank in ranks)

    def between_of(self, rank: int) -> tuple[int, ...]:
        """Those of the second stage."""
        return next(ranks for ranks in self.between if rank in ranks)

    def order(self) -> tuple[int, ...]:
        """The pieces in the order of sending, N to each rank of the node."""
        return self._pieces([rank for ranks in self.between for rank in ranks])

    def pieces_of(self, rank: int) -> tuple[int, ...]:
        """The N pieces that `rank` sums in the first stage and sends in the second, in that order."""
        return self._pieces(self.between_of(rank))

    def _pieces(self, owners: Sequence[int]) -> tuple[int, ...]:
        position = {rank: piece for piece, rank in enumerate(self.ranks)}
        return tuple(position[rank] for rank in owners)


def two_stages(ranks: Sequence[int], nodes: Sequence[int]) -> TwoStages | None:
    """How the group of `ranks` reduces in two stages; None where one is all there is to do.

    That is on one node, with one rank on each, and with more ranks on some nodes than on others.

    Args:
        ranks: global ranks, in the order of the group.
        nodes: the node of each global rank.
    """
    by_node = _by_node(ranks, nodes)
    sizes = {len(one) for one in by_node}
    if len(by_node) < 2 or sizes == {1} or len(sizes) > 1:
        return None
    between = tuple(tuple(sorted(owners)) for owners in zip(*by_node, strict=True))
    return TwoStages(tuple(ranks), by_node, between)


def is_uneven(ranks: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether some nodes have more ranks of the group than others."""
    return len({len(one) for one in _by_node(ranks, nodes)}) > 1


def links_of(ranks: Sequence[int], nodes: Sequence[int], *, rank: int) -> Links:
    """How `rank` reaches the others of the group of `ranks`; arguments as of `two_stages`."""
    num_own = sum(nodes[other] == nodes[rank] for other in ranks)
    return Links(inside=num_own - 1, between=len(ranks) - num_own, num_nodes=len({nodes[other] for other in ranks}))


def node_numbers(hosts: Sequence[str]) -> tuple[int, ...]:
    """The node of each rank from the identity of its host, numbered in the order of the ranks."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)


def host_identity() -> str:
    """What tells this host from others, as for NCCL: NCCL_HOSTID if it is set, else the host's name and boot."""
    given = os.environ.get("NCCL_HOSTID")
    if given:
        return given
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _by_node(ranks: Sequence[int], nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, in ascending order; nodes in the order of their first ranks."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(nodes[rank], []).append(rank)
    return tuple(map(tuple, found.values()))
