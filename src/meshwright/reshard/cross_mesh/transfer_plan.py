"""A plan that moves a tensor between meshes on different ranks: trainer → inference, stage → stage.

The source's parts are disjoint, and each is held by equally many ranks. So each part is by itself: what its receivers
lack of it is laid end to end, and the line is cut into as many equal stretches as ranks hold the part. Each of these
sends one stretch. Every element comes once, and no rank can send less without another one of them sending more.

Ranks are those of the world. What a rank has itself, where the meshes overlap, is copied and not sent.
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
from meshwright.reshard.run.shard_exchange import Run, joint_runs


@dataclass(frozen=True, slots=True)
class Move:
    """One message: elements `start` … `stop` of the block that both ends hold, in row-major order."""

    sender: int
    receiver: int
    start: int
    stop: int


@dataclass(frozen=True)
class TransferPlan:
    """How to get from `src` on some ranks to `dst` on others.

    Attributes:
        src: the layout before.
        start: what the moves take from: `src`, but that partial values have been reduced, by plans on the source mesh
            through `reductions(src)`.
        dst: the layout after.
        src_ranks: for each rank of the source mesh, in its order, the rank of the world.
        dst_ranks: likewise of the destination mesh.
        dtype: name of the number format, one of `DTYPE_BYTES`.
        devices_per_node: how many neighbouring ranks share a node, if that was to be used.
        moves: by sender, then receiver; at most one for each pair.
        bytes_sent: by the rank that sends most.
        bytes_received: by the rank that receives most.
        lower_bound_bytes: the most that any rank lacks: what it must receive by any method.
        even_share_bytes: what the rank that sends most must send if no rank passes on what it received: the largest
            of all parts' traffic, each divided evenly over its holders.
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

    def block(self, sender: int, receiver: int) -> tuple[tuple[Run, ...], ...]:
        """What both hold, the sender before and the receiver after: runs of indices for each dim."""
        at_sender = self.start.coordinate(self.src_ranks.index(sender))
        at_receiver = self.dst.coordinate(self.dst_ranks.index(receiver))
        return tuple(
            joint_runs(self.start.intervals(dim).row(at_sender), self.dst.intervals(dim).row(at_receiver))
            for dim in range(len(self.dst.shape))
        )

    def sends(self, rank: int) -> list[Move]:
        """The rank's messages to others, by receiver."""
        return self._by_sender.get(rank, [])

    def receives(self, rank: int) -> list[Move]:
        """Others' messages to the rank, by sender."""
        return self._by_receiver.get(rank, [])

    def copies(self, rank: int) -> bool:
        """Whether the rank is on both meshes, and keeps what it has."""
        return rank in self.src_ranks and rank in self.dst_ranks

    def bytes_by_rank(self) -> dict[int, tuple[int, int]]:
        """For each rank of either mesh what it sends and receives."""
        size = dtype_bytes(self.dtype)
        return {
            rank: (size * _elements(self.sends(rank)), size * _elements(self.receives(rank)))
            for rank in sorted({*self.src_ranks, *self.dst_ranks})
        }

    def reverse(self) -> TransferPlan:
        """The plan from `dst` back to `start`, as gradients go."""
        return plan_transfer(
            self.dst,
            self.start,
            src_ranks=self.dst_ranks,
            dst_ranks=self.src_ranks,
            dtype=self.dtype,
            devices_per_node=self.devices_per_node,
        )

    def to_json(self) -> str:
        """The plan as JSON; `from_json` is its inverse."""
        layouts = {name: asdict(getattr(self, name)) for name in ("src", "start", "dst")}
        moves = [(move.sender, move.receiver, move.start, move.stop) for move in self.moves]
        return json.dumps(asdict(replace(self, moves=())) | layouts | {"moves": moves})

    @staticmethod
    def from_json(text: str) -> TransferPlan:
        """The plan that `to_json` wrote.

        Raises:
            LayoutError: it is not one.
        """

        def make(fields: dict[str, Any]) -> TransferPlan:
            layouts = {name: layout_from(fields[name]) for name in ("src", "start", "dst")}
            ranks = {name: tuple(fields[name]) for name in ("src_ranks", "dst_ranks")}
            moves = tuple(Move(*move) for move in fields["moves"])
            return TransferPlan(**{**fields, **layouts, **ranks, "moves": moves})

        return read_plan(text, make)

    @cached_property
    def _by_sender(self) -> dict[int, list[Move]]:
        found = defaultdict(list)
        for move in self.moves:
            found[move.sender].append(move)
        return dict(found)

    @cached_property
    def _by_receiver(self) -> dict[int, list[Move]]:
        found = defaultdict(list)
        for move in self.moves:
            found[move.receiver].append(move)
        return dict(found)


def plan_transfer(
    src: Layout,
    dst: Layout,
    *,
    src_ranks: Sequence[int],
    dst_ranks: Sequence[int],
    dtype: str = "bf16",
    devices_per_node: int | None = None,
) -> TransferPlan:
    """Plan how a tensor gets from a layout on some ranks to a layout on others; the sets may overlap.

    The same on every rank. Repeated questions are answered from a cache.

    Args:
        src, dst: of one tensor, each on its own mesh; `dst` without partial values.
        src_ranks: for each rank of the source mesh, in its order, the rank of the world.
        dst_ranks: likewise of the destination mesh.
        dtype: name of the number format, one of `DTYPE_BYTES`.
        devices_per_node: how many neighbouring ranks of the world share a node. If given, ranks send to their own node
            first, as far as that keeps the balance.

    Raises:
        LayoutError: the layouts are of different tensors, a list of ranks does not fit its mesh, or `dst` is partial.
    """
    dtype_bytes(dtype)
    check_one_tensor(src, dst)
    for name, layout, ranks in (("src", src, src_ranks), ("dst", dst, dst_ranks)):
        _check_ranks(name, layout, ranks)
    if dst.partial_axes():
        raise LayoutError(
            f"the destination {dst} holds partial values",
            where="plan_transfer",
            rule="values arrive whole",
            fix=f"{dst.with_partial(dst.partial_axes(), None)} as the destination; it can be made partial there",
        )
    if devices_per_node is not None and devices_per_node < 1:
        raise LayoutError(
            f"devices_per_node = {devices_per_node}", where="plan_transfer", rule="a node has ranks", fix="None"
        )
    return _plan(src, dst, tuple(map(int, src_ranks)), tuple(map(int, dst_ranks)), dtype, devices_per_node)


def reductions(layout: Layout) -> list[Layout]:
    """The layouts through which partial values of a source become whole before they are sent, one axis at a time.

    The last partial axis is first, as it is in what the values mean. The axis then cuts what its ranks have once more,
    so that each reduces a part of it: along the dim with most indices, if any has two.
    """
    found = []
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
        found.append(layout)
    return found


@lru_cache(maxsize=64)
def _plan(
    src: Layout,
    dst: Layout,
    src_ranks: tuple[int, ...],
    dst_ranks: tuple[int, ...],
    dtype: str,
    devices_per_node: int | None,
) -> TransferPlan:
    start = [src, *reductions(src)][-1]
    receivers = np.argsort(np.asarray(dst_ranks))  # so that neighbours are served by neighbours
    at_receivers = tuple(places[receivers] for places in dst.coordinates())
    world = np.asarray(dst_ranks)[receivers]
    lacks = dst.local_numels()[receivers]
    found, even_share = [np.zeros((4, 0), np.int64)], 0
    for first, holders in _holders(start, src_ranks):
        at_holder = tuple(np.full(1, place) for place in start.coordinate(first))
        counts = np.broadcast_to(overlap_numels(start, dst, at_holder, at_receivers), world.shape)
        is_holder = np.isin(world, holders)
        lacks = lacks - np.where(is_holder, counts, 0)
        demand = np.where(is_holder, 0, counts)
        even_share = max(even_share, -(-int(demand.sum()) // len(holders)))
        found.append(_shared_out(holders, world, demand, devices_per_node))
    moves = np.concatenate(found, 1)
    moves = moves[:, np.lexsort((moves[1], moves[0]))]
    amounts, size = moves[3] - moves[2], dtype_bytes(dtype)
    return TransferPlan(
        src=src,
        start=start,
        dst=dst,
        src_ranks=src_ranks,
        dst_ranks=dst_ranks,
        dtype=dtype,
        devices_per_node=devices_per_node,
        moves=tuple(Move(*move) for move in moves.T.tolist()),
        bytes_sent=size * _largest(moves[0], amounts),
        bytes_received=size * _largest(moves[1], amounts),
        lower_bound_bytes=size * int(lacks.max()),
        even_share_bytes=size * even_share,
    )


def _holders(layout: Layout, ranks: tuple[int, ...]) -> list[tuple[int, Ints]]:
    """For each part of the tensor one rank of the mesh that has it, and the ranks of the world that do, ascending."""
    copies = layout.replicated_axes()
    cutting = [axis for axis in range(len(layout.axis_sizes)) if axis not in copies]
    grid = np.arange(layout.num_ranks()).reshape(layout.axis_sizes).transpose([*cutting, *copies])
    grid = grid.reshape(-1, math.prod(layout.axis_sizes[axis] for axis in copies))
    return [(int(row[0]), np.sort(np.asarray(ranks)[row])) for row in grid]


def _shared_out(holders: Ints, receivers: Ints, demand: Ints, devices_per_node: int | None) -> Ints:
    """Moves of one part, as columns (sender, receiver, start, stop): each holder sends the same but for one element.

    Two holders never send in two places to one receiver: one that is left with something to receive after its own
    node's turn has left its node's holders nothing to send.
    """
    total, num_holders = int(demand.sum()), len(holders)
    supply = total // num_holders + (np.arange(num_holders) < total % num_holders)
    done = np.zeros_like(demand)
    found = []
    for of_holders, of_receivers in _turns(holders, receivers, devices_per_node):
        sends = np.where(of_holders, supply, 0)
        wants = np.where(of_receivers, demand - done, 0)
        giver, taker, low, high = _laid_along(sends, wants)
        start = low - (np.cumsum(wants) - wants)[taker] + done[taker]
        found.append(np.stack([holders[giver], receivers[taker], start, start + high - low]))
        np.subtract.at(supply, giver, high - low)
        np.add.at(done, taker, high - low)
    return np.concatenate(found, 1)


def _turns(holders: Ints, receivers: Ints, devices_per_node: int | None) -> list[tuple[Ints, Ints]]:
    """Whose turn it is to be matched, holders and receivers: each node by itself, and then all."""
    everyone = (np.ones(len(holders), bool), np.ones(len(receivers), bool))
    if devices_per_node is None:
        return [everyone]
    of_holders, of_receivers = holders // devices_per_node, receivers // devices_per_node
    nodes = np.intersect1d(of_holders, of_receivers)
    return [*((of_holders == node, of_receivers == node) for node in nodes), everyone]


def _laid_along(supply: Ints, demand: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Both laid end to end along one line, which they cut into stretches: whose each is, from where to where."""
    ends_of_supply, ends_of_demand = np.cumsum(supply), np.cumsum(demand)
    total = min(ends_of_supply[-1], ends_of_demand[-1])
    edges = np.unique(np.concatenate([[0, total], ends_of_supply, ends_of_demand]))
    edges = edges[edges <= total]
    low, high = edges[:-1], edges[1:]
    return (
        np.searchsorted(ends_of_supply, low, side="right"),
        np.searchsorted(ends_of_demand, low, side="right"),
        low,
        high,
    )


def _largest(ranks: Ints, amounts: Ints) -> int:
    """The most that any rank has of the amounts."""
    sums: defaultdict[int, int] = defaultdict(int)
    for rank, amount in zip(ranks.tolist(), amounts.tolist(), strict=True):
        sums[rank] += amount
    return max(sums.values(), default=0)


def _elements(moves: list[Move]) -> int:
    return sum(move.stop - move.start for move in moves)


def _check_ranks(name: str, layout: Layout, ranks: Sequence[int]) -> None:
    if len(ranks) != layout.num_ranks() or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise LayoutError(
            f"{name}_ranks = {list(ranks)} for a mesh of {' × '.join(map(str, layout.axis_sizes)) or 'one rank'}",
            where="plan_transfer",
            rule="for each rank of the mesh one rank of the world, each another one",
            fix=f"{layout.num_ranks()} different ranks",
        )
