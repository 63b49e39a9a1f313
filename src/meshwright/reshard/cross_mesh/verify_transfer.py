"""Whether a transfer between meshes gives every rank each of its elements once, from ranks that have it, evenly.

Written without the planner's arithmetic: from the slices of every rank and the messages alone.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.cross_mesh.transfer_plan import Move, TransferPlan
from meshwright.reshard.planner.steps import dtype_bytes

SLACK = 1.1
"""How much more than an even share a rank may send."""

Part = tuple[tuple[slice, ...], ...]
Key = tuple[tuple[tuple[int, int], ...], ...]
"""A part as what can be compared: two ranks with the same one hold the same elements."""


def verify_transfer(plan: TransferPlan) -> None:
    """See that a plan moves the tensor right, and that no rank sends much more than it must.

    Raises:
        LayoutError: it doesn't: an element that comes twice or never, a message by a rank that does not hold it or to
            one that is not to have it, one rank that sends much more than others that could, or false sums.
    """
    _check_layouts(plan)
    held, wanted = _parts(plan.start, plan.src_ranks), _parts(plan.dst, plan.dst_ranks)
    _check_ends(plan, held, wanted)
    lacked = _check_arrivals(plan, held, wanted)
    share = _check_balance(plan, held)
    _check_sums(plan, lacked, share)


def _check_layouts(plan: TransferPlan) -> None:
    is_whole = not plan.start.partial_axes() and not plan.dst.partial_axes()
    is_same = plan.start == plan.src or plan.src.partial_axes()
    if not is_whole or not is_same or plan.src.axis_sizes != plan.start.axis_sizes:
        raise _fault(f"it starts at {plan.start} and ends at {plan.dst}", "whole values are sent and arrive")
    for layout, ranks in ((plan.start, plan.src_ranks), (plan.dst, plan.dst_ranks)):
        if layout.num_ranks() != len(ranks) or len(set(ranks)) != len(ranks):
            raise _fault(f"{len(ranks)} ranks for {layout.num_ranks()} places", "each place of a mesh is a rank's")


def _check_ends(plan: TransferPlan, held: dict[int, Part], wanted: dict[int, Part]) -> None:
    for move in plan.moves:
        if move.sender not in held or move.receiver not in wanted or move.sender == move.receiver:
            raise _fault(_words(move), "messages go from another rank of the source mesh to one of the destination's")
        if not 0 <= move.start < move.stop <= _common(held[move.sender], wanted[move.receiver]):
            raise _fault(_words(move), "a rank sends what it holds and the receiver is to have, and not nothing")


def _check_arrivals(plan: TransferPlan, held: dict[int, Part], wanted: dict[int, Part]) -> int:
    """The most elements that any rank lacks, once each comes once to each rank that lacks it."""
    keys = {rank: _key(part) for rank, part in held.items()}
    arriving: dict[int, defaultdict[Key, list[Move]]] = {rank: defaultdict(list) for rank in wanted}
    for move in plan.moves:
        arriving[move.receiver][keys[move.sender]].append(move)
    most = 0
    for rank, blocks in arriving.items():
        part, own = wanted[rank], held.get(rank)
        if own is not None and keys[rank] in blocks:
            raise _fault(_words(blocks[keys[rank]][0]), "what a rank has itself is not sent to it")
        lacking = _numel(part) - (0 if own is None else _common(own, part))
        # The source's parts are disjoint, so blocks without gaps that add up are all of it.
        found = sum(_end_to_end(moves, _common(held[moves[0].sender], part)) for moves in blocks.values())
        if found != lacking:
            raise _fault(f"rank {rank} receives {found} of the {lacking} elements it lacks", "each element comes once")
        most = max(most, lacking)
    return most


def _end_to_end(moves: list[Move], numel: int) -> int:
    """Elements of the messages, which together are the block of `numel` elements, each once."""
    at = 0
    for move in sorted(moves, key=lambda move: move.start):
        if move.start < at:
            raise _fault(f"{_words(move)}, of which {at - move.start} or more come twice", "each element comes once")
        if move.start > at:
            raise _fault(f"elements {at} … {move.start} before {_words(move)} are missing", "each element comes once")
        at = move.stop
    if at < numel:
        raise _fault(f"elements {at} … {numel} after {_words(moves[-1])} are missing", "each element comes once")
    return at


def _check_balance(plan: TransferPlan, held: dict[int, Part]) -> int:
    """The largest even share, in elements, once no rank sends much more than its part's."""
    sent: defaultdict[int, int] = defaultdict(int)
    for move in plan.moves:
        sent[move.sender] += move.stop - move.start
    holders: defaultdict[Key, list[int]] = defaultdict(list)
    for rank, part in held.items():
        holders[_key(part)].append(rank)
    largest = 0
    for ranks in holders.values():
        share = -(-sum(sent[rank] for rank in ranks) // len(ranks))
        for rank in ranks:
            if sent[rank] > SLACK * share:
                raise _fault(
                    f"rank {rank} sends {sent[rank]} elements, where {len(ranks)} ranks could send {share} each",
                    "those that hold the same send the same, to within 10 %",
                )
        largest = max(largest, share)
    return largest


def _check_sums(plan: TransferPlan, lacked: int, share: int) -> None:
    size = dtype_bytes(plan.dtype)
    by_rank = plan.bytes_by_rank().values()
    found = {
        "bytes_sent": max(sent for sent, _ in by_rank),
        "bytes_received": max(received for _, received in by_rank),
        "lower_bound_bytes": size * lacked,
        "even_share_bytes": size * share,
    }
    for name, value in found.items():
        if getattr(plan, name) != value:
            raise _fault(f"{name} = {getattr(plan, name)}", f"by its messages it is {value}")


def _parts(layout: Layout, ranks: tuple[int, ...]) -> dict[int, Part]:
    return {rank: layout.local_slices(place) for place, rank in enumerate(ranks)}


def _key(part: Part) -> Key:
    return tuple(tuple((s.start, s.stop) for s in slices) for slices in part)


def _numel(part: Part) -> int:
    count = 1
    for slices in part:
        count *= sum(s.stop - s.start for s in slices)
    return count


def _common(a: Part, b: Part) -> int:
    """Elements in both parts."""
    count = 1
    for mine, others in zip(a, b, strict=True):
        count *= sum(max(0, min(s.stop, t.stop) - max(s.start, t.start)) for s in mine for t in others)
    return count


def _words(move: Move) -> str:
    return f"the message of elements {move.start} … {move.stop} from rank {move.sender} to rank {move.receiver}"


def _fault(what: str, rule: str) -> LayoutError:
    return LayoutError(what, where="transfer between meshes", rule=rule, fix="the plan that plan_transfer makes")
