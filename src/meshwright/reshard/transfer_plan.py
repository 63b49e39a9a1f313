"""Plan for transferring a tensor between meshes on different ranks: trainer → inference, stage → stage.

The source shards are disjoint and all have the same number of replicas, so each shard is planned independently. The
elements that its receivers lack are concatenated, and the sequence is split evenly among the shard's replicas. Each
receiver gets each element once, and no rank can send less unless another replica of its shard sends more.

Ranks are global. Where the meshes overlap, elements that a rank already holds are copied locally, not sent.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout, overlap_numels
from meshwright.mesh.shard_intervals import Ints, Split
from meshwright.reshard.planner.steps import check_one_tensor, dtype_bytes, layout_from, read_plan
from meshwright.reshard.run.shard_exchange import IndexRun, intersect_runs
from meshwright.units import counted


@dataclass(frozen=True, slots=True)
class Move:
    """Message with elements `[start, stop)` of the block that both ranks hold, in row-major order."""

    sender: int
    receiver: int
    start: int
    stop: int


@dataclass(frozen=True)
class TransferPlan:
    """Plan for transferring a tensor from layout `src` on some ranks to layout `dst` on others.

    Attributes:
        start: the layout from which messages are sent: `src` after reducing its partial values on the source mesh,
            through the layouts of `reduction_layouts(src)`.
        src_ranks: global rank of each rank of the source mesh, in mesh order.
        dst_ranks: global rank of each rank of the destination mesh, in mesh order.
        dtype: a key of `DTYPE_BYTES`.
        devices_per_node: number of consecutive ranks per node, or None if nodes are ignored.
        moves: messages sorted by sender, then receiver; at most one per pair.
        bytes_sent: bytes sent by the rank that sends most.
        bytes_received: bytes received by the rank that receives most.
        lower_bound_bytes: the most bytes that any rank lacks and therefore must receive with any method.
        even_share_bytes: lower bound on `bytes_sent` if ranks do not forward received data: the maximum over source
            shards of the bytes sent from the shard divided by its number of replicas.
    """

    src: Layout
    start: Layout
    dst: Layout
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    dtype: str
    devices_per_node: int | None
    moves: tuple[Move, ...]
    bytes_sent: int
    bytes_received: int
    lower_bound_bytes: int
    even_share_bytes: int

    def block(self, sender: int, receiver: int) -> tuple[tuple[IndexRun, ...], ...]:
        """Return the overlap of the sender's source shard and the receiver's destination shard, as runs per dim."""
        at_sender = self.start.coordinate(self.src_ranks.index(sender))
        at_receiver = self.dst.coordinate(self.dst_ranks.index(receiver))
        return tuple(
            intersect_runs(self.start.intervals(dim).row(at_sender), self.dst.intervals(dim).row(at_receiver))
            for dim in range(len(self.dst.shape))
        )

    def sends(self, rank: int) -> list[Move]:
        """Return the messages sent by a rank, sorted by receiver."""
        return self._by_rank[0].get(rank, [])

    def receives(self, rank: int) -> list[Move]:
        """Return the messages received by a rank, sorted by sender."""
        return self._by_rank[1].get(rank, [])

    @cached_property
    def _by_rank(self) -> tuple[dict[int, list[Move]], dict[int, list[Move]]]:
        sent, received = defaultdict(list), defaultdict(list)
        for move in self.moves:
            sent[move.sender].append(move)
            received[move.receiver].append(move)
        return dict(sent), dict(received)

    def has_local_copy(self, rank: int) -> bool:
        """Return whether the rank is on both meshes and copies elements locally."""
        return rank in self.src_ranks and rank in self.dst_ranks

    def bytes_by_rank(self) -> dict[int, tuple[int, int]]:
        """Return the bytes sent and received by each rank of either mesh."""

        def num_bytes(moves: list[Move]) -> int:
            return dtype_bytes(self.dtype) * sum(move.stop - move.start for move in moves)

        ranks = sorted({*self.src_ranks, *self.dst_ranks})
        return {rank: (num_bytes(self.sends(rank)), num_bytes(self.receives(rank))) for rank in ranks}

    def reverse(self) -> TransferPlan:
        """Return the plan from `dst` back to `start`, used for gradients."""
        return plan_transfer(
            self.dst,
            self.start,
            src_ranks=self.dst_ranks,
            dst_ranks=self.src_ranks,
            dtype=self.dtype,
            devices_per_node=self.devices_per_node,
        )

    def to_json(self) -> str:
        """Serialize the plan to JSON; `from_json` is the inverse."""
        layouts = {name: asdict(getattr(self, name)) for name in ("src", "start", "dst")}
        moves = [(move.sender, move.receiver, move.start, move.stop) for move in self.moves]
        return json.dumps(asdict(replace(self, moves=())) | layouts | {"moves": moves})

    @staticmethod
    def from_json(text: str) -> TransferPlan:
        """Read a plan written by `to_json`.

        Raises:
            LayoutError: if `text` is not a transfer plan.
        """

        def make(fields: dict[str, Any]) -> TransferPlan:
            layouts = {name: layout_from(fields[name]) for name in ("src", "start", "dst")}
            ranks = {name: tuple(fields[name]) for name in ("src_ranks", "dst_ranks")}
            moves = tuple(Move(*move) for move in fields["moves"])
            return TransferPlan(**{**fields, **layouts, **ranks, "moves": moves})

        return read_plan(text, make)


def plan_transfer(
    src: Layout,
    dst: Layout,
    *,
    src_ranks: Sequence[int],
    dst_ranks: Sequence[int],
    dtype: str = "bf16",
    devices_per_node: int | None = None,
) -> TransferPlan:
    """Plan the transfer of a tensor from a layout on some ranks to a layout on others; the rank sets may overlap.

    Deterministic, so all ranks compute the same plan. Results are cached. Arguments are as in `TransferPlan`; `dst` has
    no partial values. With `devices_per_node`, sends within a node are preferred as long as the load stays balanced.

    Raises:
        LayoutError: if the layouts have different tensor shapes, a list of ranks does not fit its mesh, or `dst` is
            partial.
    """
    dtype_bytes(dtype)
    check_one_tensor(src, dst)
    for name, layout, ranks in (("src", src, src_ranks), ("dst", dst, dst_ranks)):
        if len(ranks) != layout.num_ranks() or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise LayoutError(
                f"{name}_ranks = {list(ranks)} for a mesh of {' × '.join(map(str, layout.axis_sizes)) or 'one rank'}",
                where="plan_transfer",
                rule="one global rank for each rank of the mesh, without duplicates",
                fix=f"pass {counted(layout.num_ranks(), 'different rank')}",
            )
    if dst.partial_axes():
        raise LayoutError(
            f"the destination {dst} holds partial values",
            where="plan_transfer",
            rule="a transfer cannot create partial values",
            fix=f"transfer to {dst.with_partial(dst.partial_axes(), None)}, then make it partial there",
        )
    if devices_per_node is not None and devices_per_node < 1:
        raise LayoutError(
            f"devices_per_node = {devices_per_node}", where="plan_transfer", rule="at least 1, or None", fix="None"
        )
    return _plan(src, dst, tuple(map(int, src_ranks)), tuple(map(int, dst_ranks)), dtype, devices_per_node)


def reduction_layouts(layout: Layout) -> list[Layout]:
    """Return the sequence of layouts that reduces the source's partial values before the transfer, axis by axis.

    The last partial axis is reduced first, as the layout defines. Once reduced, an axis shards the dim with the longest
    shards (if longer than 1), so that each rank reduces only a part of the tensor.
    """
    messages_of = []
    for axis in reversed(layout.partial_axes()):
        splits, partial = list(layout.splits), list(layout.partial)
        extents = {
            dim: size // math.prod(layout.axis_sizes[split.axis] for split in splits[dim])
            for dim, size in enumerate(layout.shape)
            if all(split.parts == 1 for split in splits[dim])
        }
        dim = max(extents, key=lambda dim: extents[dim], default=None)
        if dim is not None and extents[dim] > 1:
            splits[dim] = (*splits[dim], Split(axis))
        partial[axis] = None
        layout = replace(layout, splits=tuple(splits), partial=tuple(partial))
        messages_of.append(layout)
    return messages_of


@lru_cache(maxsize=64)
def _plan(
    src: Layout, dst: Layout, src_ranks: tuple[int, ...], dst_ranks: tuple[int, ...], dtype: str, per_node: int | None
) -> TransferPlan:
    start = [src, *reduction_layouts(src)][-1]
    receivers = np.argsort(np.asarray(dst_ranks))  # so that neighboring ranks exchange messages
    receiver_coordinates = tuple(places[receivers] for places in dst.coordinates())
    world = np.asarray(dst_ranks)[receivers]
    lacks = dst.local_numels()[receivers]
    messages_of, even_share = [np.zeros((4, 0), np.int64)], 0
    for first, holders in _holders(start, src_ranks):
        holder_coordinate = tuple(np.full(1, place) for place in start.coordinate(first))
        counts = np.broadcast_to(overlap_numels(start, dst, holder_coordinate, receiver_coordinates), world.shape)
        is_holder = np.isin(world, holders)
        lacks = lacks - np.where(is_holder, counts, 0)
        demand = np.where(is_holder, 0, counts)
        even_share = max(even_share, -(-int(demand.sum()) // len(holders)))
        messages_of.append(_assign_messages(holders, world, demand, per_node))
    moves = np.concatenate(messages_of, 1)
    moves = moves[:, np.lexsort((moves[1], moves[0]))]
    amounts, size = moves[3] - moves[2], dtype_bytes(dtype)
    return TransferPlan(
        src=src,
        start=start,
        dst=dst,
        src_ranks=src_ranks,
        dst_ranks=dst_ranks,
        dtype=dtype,
        devices_per_node=per_node,
        moves=tuple(Move(*move) for move in moves.T.tolist()),
        bytes_sent=size * int(np.bincount(moves[0], amounts).max(initial=0)),
        bytes_received=size * int(np.bincount(moves[1], amounts).max(initial=0)),
        lower_bound_bytes=size * int(lacks.max()),
        even_share_bytes=size * even_share,
    )


def _holders(layout: Layout, ranks: tuple[int, ...]) -> list[tuple[int, Ints]]:
    """Return, for each shard, the mesh rank of one replica and the global ranks of all replicas, ascending."""
    copies = layout.replicated_axes()
    sharding_axes = [axis for axis in range(len(layout.axis_sizes)) if axis not in copies]
    grid = np.arange(layout.num_ranks()).reshape(layout.axis_sizes).transpose([*sharding_axes, *copies])
    grid = grid.reshape(-1, math.prod(layout.axis_sizes[axis] for axis in copies))
    return [(int(row[0]), np.sort(np.asarray(ranks)[row])) for row in grid]


def _assign_messages(holders: Ints, receivers: Ints, demand: Ints, devices_per_node: int | None) -> Ints:
    """Return the messages of one shard as columns (sender, receiver, start, stop), balanced to within one element.

    No sender sends two messages to the same receiver: if a receiver still lacks elements after its node's round, the
    holders on that node have no supply left.
    """
    total, num_holders = int(demand.sum()), len(holders)
    supply = total // num_holders + (np.arange(num_holders) < total % num_holders)
    done = np.zeros_like(demand)
    messages_of = []
    for holder_mask, receiver_mask in _matching_rounds(holders, receivers, devices_per_node):
        sends = np.where(holder_mask, supply, 0)
        wants = np.where(receiver_mask, demand - done, 0)
        holder_index, receiver_index, low, high = _match_intervals(sends, wants)
        start = low - (np.cumsum(wants) - wants)[receiver_index] + done[receiver_index]
        messages_of.append(np.stack([holders[holder_index], receivers[receiver_index], start, start + high - low]))
        np.subtract.at(supply, holder_index, high - low)
        np.add.at(done, receiver_index, high - low)
    return np.concatenate(messages_of, 1)


def _matching_rounds(holders: Ints, receivers: Ints, devices_per_node: int | None) -> list[tuple[Ints, Ints]]:
    """Return masks of the holders and receivers to match in each round: first within each node, then all ranks."""
    all_ranks = (np.ones(len(holders), bool), np.ones(len(receivers), bool))
    if devices_per_node is None:
        return [all_ranks]
    holder_mask, receiver_mask = holders // devices_per_node, receivers // devices_per_node
    nodes = np.intersect1d(holder_mask, receiver_mask)
    return [*((holder_mask == node, receiver_mask == node) for node in nodes), all_ranks]


def _match_intervals(supply: Ints, demand: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Split `[0, total)` at both cumulative sums; return each interval's holder, receiver, start and stop."""
    ends_of_supply, ends_of_demand = np.cumsum(supply), np.cumsum(demand)
    total = min(ends_of_supply[-1], ends_of_demand[-1])
    edges = np.unique(np.concatenate([[0, total], ends_of_supply, ends_of_demand]))
    edges = edges[edges <= total]
    low, high = edges[:-1], edges[1:]
    holder, receiver = (np.searchsorted(ends, low, side="right") for ends in (ends_of_supply, ends_of_demand))
    return holder, receiver, low, high
