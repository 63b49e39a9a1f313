"""Text summary of a transfer between meshes."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.mesh.layout import Layout
from meshwright.reshard.cross_mesh.transfer_plan import TransferPlan
from meshwright.units import counted, format_bytes

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
    if len(ranks) == 1:
        words = f"rank {first}"
    elif list(ranks) == list(range(first, last + 1)):
        words = f"ranks {first}–{last}"
    else:
        words = "ranks " + ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"{str(layout) or 'unsharded'} on {words}"
