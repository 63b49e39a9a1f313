"""Verify and summarize a transfer between meshes: that it delivers each element once, from ranks that hold it, with
balanced traffic.

The checks are independent of the planner's arithmetic: they use only the messages and each rank's slices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import dtype_bytes
from meshwright.reshard.transfer_plan import Move, TransferPlan
from meshwright.units import counted, format_bytes

SLACK = 1.1
"""Maximum ratio of the elements a rank sends to its even share."""

ONCE = "each element arrives once"

TensorSlices = tuple[tuple[slice, ...], ...]
SlicesKey = tuple[tuple[tuple[int, int], ...], ...]
"""Hashable form of a shard's slices; equal on ranks that hold the same elements."""


def verify_transfer(plan: TransferPlan) -> None:
    """Verify that a plan transfers the tensor correctly and balances the traffic.

    Raises:
        LayoutError: if an element arrives twice or never, a sender does not hold its message, a receiver does not need
            it, replicas send uneven shares, or the totals are wrong.
    """
    _check_layouts(plan)
    held, wanted = _slices_by_rank(plan.start, plan.src_ranks), _slices_by_rank(plan.dst, plan.dst_ranks)
    _check_messages(plan, held, wanted)
    lacked = _check_arrivals(plan, held, wanted)
    share = _check_balance(plan, held)
    _check_totals(plan, lacked, share)


def _check_layouts(plan: TransferPlan) -> None:
    is_whole = not plan.start.partial_axes() and not plan.dst.partial_axes()
    is_same = plan.start == plan.src or plan.src.partial_axes()
    if not is_whole or not is_same or plan.src.axis_sizes != plan.start.axis_sizes:
        raise _error(f"messages go from {plan.start} to {plan.dst}", "neither layout may be partial")
    for layout, ranks in ((plan.start, plan.src_ranks), (plan.dst, plan.dst_ranks)):
        if layout.num_ranks() != len(ranks) or len(set(ranks)) != len(ranks):
            what = f"{counted(len(ranks), 'rank')} for a mesh of {layout.num_ranks()}"
            raise _error(what, "one distinct rank per mesh position")


def _check_messages(plan: TransferPlan, held: dict[int, TensorSlices], wanted: dict[int, TensorSlices]) -> None:
    for move in plan.moves:
        if move.sender not in held or move.receiver not in wanted or move.sender == move.receiver:
            rule = "senders are on the source mesh, receivers differ and are on the destination mesh"
            raise _error(_describe(move), rule)
        if not 0 <= move.start < move.stop <= _num_common(held[move.sender], wanted[move.receiver]):
            raise _error(_describe(move), "a message is a non-empty part of what both ranks hold")


def _check_arrivals(plan: TransferPlan, held: dict[int, TensorSlices], wanted: dict[int, TensorSlices]) -> int:
    """Check that each rank receives each element it lacks once; return the most elements that any rank lacks."""
    keys = {rank: _key(shard) for rank, shard in held.items()}
    arriving: dict[int, defaultdict[SlicesKey, list[Move]]] = {rank: defaultdict(list) for rank in wanted}
    for move in plan.moves:
        arriving[move.receiver][keys[move.sender]].append(move)
    most = 0
    for rank, blocks in arriving.items():
        shard, own = wanted[rank], held.get(rank)
        if own is not None and keys[rank] in blocks:
            raise _error(_describe(blocks[keys[rank]][0]), "a rank does not receive what it has itself")
        lacking = _num_common(shard, shard) - (0 if own is None else _num_common(own, shard))
        # Source shards are disjoint, so complete blocks of the right total size cover the whole shard.
        num_received = sum(_check_contiguous(m, _num_common(held[m[0].sender], shard)) for m in blocks.values())
        if num_received != lacking:
            raise _error(f"rank {rank} receives {num_received} of the {lacking} elements it lacks", ONCE)
        most = max(most, lacking)
    return most


def _check_contiguous(moves: list[Move], numel: int) -> int:
    """Check that the messages cover each of the block's `numel` elements once; return `numel`."""
    at = 0
    for move in sorted(moves, key=lambda move: move.start):
        if move.start < at:
            raise _error(f"{_describe(move)}, of which {at - move.start} or more arrive twice", ONCE)
        if move.start > at:
            raise _error(f"elements {at}:{move.start} before {_describe(move)} are missing", ONCE)
        at = move.stop
    if at < numel:
        raise _error(f"elements {at}:{numel} after {_describe(moves[-1])} are missing", ONCE)
    return at


def _check_balance(plan: TransferPlan, held: dict[int, TensorSlices]) -> int:
    """Check that no rank sends much more than its even share; return the largest even share, in elements."""
    sent: defaultdict[int, int] = defaultdict(int)
    for move in plan.moves:
        sent[move.sender] += move.stop - move.start
    holders: defaultdict[SlicesKey, list[int]] = defaultdict(list)
    for rank, shard in held.items():
        holders[_key(shard)].append(rank)
    largest = 0
    for ranks in holders.values():
        share = -(-sum(sent[rank] for rank in ranks) // len(ranks))
        for rank in ranks:
            if sent[rank] > SLACK * share:
                what = f"rank {rank} sends {sent[rank]} elements, where each rank could send {share}"
                raise _error(what, "ranks that hold the same shard send the same amount, to within 10 %")
        largest = max(largest, share)
    return largest


def _check_totals(plan: TransferPlan, lacked: int, share: int) -> None:
    size = dtype_bytes(plan.dtype)
    sent, received = (max(of_ranks) for of_ranks in zip(*plan.bytes_by_rank().values(), strict=True))
    for name, value in (("bytes_sent", sent), ("bytes_received", received), ("lower_bound_bytes", size * lacked),
                        ("even_share_bytes", size * share)):  # fmt: skip
        if getattr(plan, name) != value:
            raise _error(f"{name} = {getattr(plan, name)}", f"its messages add up to {value}")


def _slices_by_rank(layout: Layout, ranks: tuple[int, ...]) -> dict[int, TensorSlices]:
    return {rank: layout.local_slices(place) for place, rank in enumerate(ranks)}


def _key(shard: TensorSlices) -> SlicesKey:
    return tuple(tuple((s.start, s.stop) for s in slices) for slices in shard)


def _num_common(a: TensorSlices, b: TensorSlices) -> int:
    """Return the number of elements in both shards."""
    return math.prod(
        sum(max(0, min(s.stop, t.stop) - max(s.start, t.start)) for s in mine for t in others)
        for mine, others in zip(a, b, strict=True)
    )


def _describe(move: Move) -> str:
    return f"the message of elements {move.start} … {move.stop} from rank {move.sender} to rank {move.receiver}"


def _error(what: str, rule: str) -> LayoutError:
    return LayoutError(what, where="transfer between meshes", rule=rule, fix="use the plan that plan_transfer returns")


MAX_RANKS = 32
"""Maximum number of ranks listed individually."""


def explain_transfer(plan: TransferPlan) -> str:
    """Return a table of the bytes sent and received by each rank, with totals and lower bounds."""
    shape = " × ".join(map(str, plan.src.shape)) or "scalar"
    lines = [
        f"{plan.dtype} {shape}: {_describe_end(plan.src, plan.src_ranks)} → {_describe_end(plan.dst, plan.dst_ranks)}",
        f"{plan.src} is first reduced to {plan.start} on the source mesh" if plan.src != plan.start else "",
        "",
        f"{'rank':>6} {'sends':>10} {'to':>5} {'receives':>10} {'from':>5}",
    ]
    by_rank = plan.bytes_by_rank()
    for rank, (sent, received) in list(by_rank.items())[:MAX_RANKS]:
        line = f"{rank:>6} {format_bytes(sent):>10} {len(plan.sends(rank)):>5}"
        line += f" {format_bytes(received):>10} {len(plan.receives(rank)):>5}"
        lines.append(line + ("  keeps its local elements" if plan.has_local_copy(rank) else ""))
    if len(by_rank) > MAX_RANKS:
        lines.append(f"{'…':>6} and {counted(len(by_rank) - MAX_RANKS, 'more rank')}")
    lines += [
        "",
        f"messages        {len(plan.moves)}",
        f"max sent        {format_bytes(plan.bytes_sent)}, even share {format_bytes(plan.even_share_bytes)}",
        f"max received    {format_bytes(plan.bytes_received)}, lower bound {format_bytes(plan.lower_bound_bytes)}",
    ]
    return "\n".join(line for at, line in enumerate(lines) if line or at != 1)


def _describe_end(layout: Layout, ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    words = "ranks " + ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    if list(ranks) == list(range(first, last + 1)):
        words = f"rank {first}" if len(ranks) == 1 else f"ranks {first}–{last}"
    return f"{str(layout) or 'unsharded'} on {words}"
