"""Plans between meshes: every element comes once, senders share evenly, and the verifier finds seeded faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Reduction
from meshwright.reshard.transfer_plan import Move, TransferPlan, plan_transfer, reduction_layouts
from meshwright.reshard.verify_transfer import explain_transfer, verify_transfer

Ints = NDArray[np.int64]
MESHES = [(1,), (4,), (2, 3), (3, 2), (2, 2, 2), (3, 1, 2)]


@st.composite
def transfers(draw: st.DrawFn) -> TransferPlan:
    """Between any two layouts; rank sets disjoint, overlapping or the same, in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    layouts, ranks = [], []
    words = ["R"] + [cut.format(dim) for dim in range(len(shape)) for cut in ("S{}", "SS{}/2", "SS{}/3")]
    for _ in range(2):
        axis_sizes = draw(st.sampled_from(MESHES))
        text = " ".join(draw(st.sampled_from(words)) for _ in axis_sizes)
        layouts.append(Layout.parse(text, axis_sizes, shape))
        ranks.append(draw(st.permutations(range(16)))[: layouts[-1].num_ranks()])
    src, dst = layouts
    if copies := src.replicated_axes():
        src = src.with_partial(draw(st.lists(st.sampled_from(copies), unique=True)), Reduction.SUM)
    devices_per_node = draw(st.sampled_from([None, 1, 4, 16]))
    return plan_transfer(src, dst, src_ranks=ranks[0], dst_ranks=ranks[1], devices_per_node=devices_per_node)


def part(layout: Layout, place: int) -> Ints:
    """The numbers of a rank's elements in the whole tensor, in the order of its tensor."""
    x = np.arange(np.prod(layout.shape, dtype=int)).reshape(layout.shape)
    for dim, slices in enumerate(layout.local_slices(place)):
        x = x.take(np.concatenate([np.zeros(0, int), *(np.arange(s.start, s.stop) for s in slices)]), axis=dim)
    return x.reshape(-1)


def carried_out(plan: TransferPlan) -> dict[int, list[int]]:
    """What arrives at each rank of the destination, its own included, from the elements' numbers alone."""
    held = {rank: part(plan.start, place) for place, rank in enumerate(plan.src_ranks)}
    wanted = {rank: part(plan.dst, place) for place, rank in enumerate(plan.dst_ranks)}
    arrived: defaultdict[int, list[int]] = defaultdict(list)
    for rank in wanted:
        if rank in held:
            arrived[rank] += [int(one) for one in wanted[rank] if one in set(held[rank].tolist())]
    for move in plan.moves:
        block = wanted[move.receiver][np.isin(wanted[move.receiver], held[move.sender])]
        assert move.stop <= len(block)
        arrived[move.receiver] += block[move.start : move.stop].tolist()
    return arrived


@settings(max_examples=120)
@given(transfers())
def test_every_element_comes_once_and_senders_share_evenly(plan: TransferPlan) -> None:
    arrived = carried_out(plan)
    for place, rank in enumerate(plan.dst_ranks):
        assert sorted(arrived[rank]) == part(plan.dst, place).tolist()
    sent: defaultdict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for place, rank in enumerate(plan.src_ranks):
        sent[tuple(part(plan.start, place))][rank] = plan.bytes_by_rank()[rank][0]
    for of_part, by_rank in sent.items():
        if of_part:
            assert max(by_rank.values()) - min(by_rank.values()) <= 2  # one element of two bytes
    assert len({(move.sender, move.receiver) for move in plan.moves}) == len(plan.moves)
    verify_transfer(plan)
    assert plan.bytes_received == plan.lower_bound_bytes
    assert plan.bytes_sent == plan.even_share_bytes
    assert TransferPlan.from_json(plan.to_json()) == plan
    assert explain_transfer(plan)


@settings(max_examples=60)
@given(transfers())
def test_blocks_are_what_both_ends_hold(plan: TransferPlan) -> None:
    for move in plan.moves[:5]:
        held = part(plan.start, plan.src_ranks.index(move.sender))
        wanted = part(plan.dst, plan.dst_ranks.index(move.receiver))
        at = {"source": np.arange(len(held)), "target": np.arange(len(wanted))}
        shapes = {
            "source": plan.start.local_shape(plan.src_ranks.index(move.sender)),
            "target": plan.dst.local_shape(plan.dst_ranks.index(move.receiver)),
        }
        runs = plan.block(move.sender, move.receiver)
        both = []
        for end, numbers in (("source", held), ("target", wanted)):
            index = [[getattr(run, end) + i for run in of_dim for i in range(run.length)] for of_dim in runs]
            both.append(numbers[at[end].reshape(shapes[end])[np.ix_(*index)].reshape(-1) if index else at[end]])
        assert np.array_equal(*both)
        assert np.array_equal(both[1], wanted[np.isin(wanted, held)])


def trainer_to_inference(first: int) -> TransferPlan:
    """(dp 2, tp 2) on ranks 0–3 → (tp 4) on four ranks from `first`."""
    src, dst = Layout.parse("R S0", (2, 2), (64, 48)), Layout.parse("S1", (4,), (64, 48))
    return plan_transfer(src, dst, src_ranks=range(4), dst_ranks=range(first, first + 4))


@pytest.mark.parametrize("first", [4, 2, 0])
def test_trainer_to_inference(first: int) -> None:
    plan = trainer_to_inference(first)
    verify_transfer(plan)
    assert plan.bytes_sent == plan.even_share_bytes
    lacked = {4: 64 * 12, 2: 64 * 12, 0: 32 * 12}[first]
    assert plan.bytes_received == plan.lower_bound_bytes == 2 * lacked


@pytest.mark.parametrize(("devices_per_node", "crossing"), [(None, 30), (2, 20)])
def test_ranks_send_to_their_own_node_first(devices_per_node: int | None, crossing: int) -> None:
    src, dst = Layout.parse("R", (2,), (40,)), Layout.parse("S0", (4,), (40,))
    plan = plan_transfer(src, dst, src_ranks=[0, 2], dst_ranks=[1, 3, 4, 5], devices_per_node=devices_per_node)
    verify_transfer(plan)
    assert sum(m.stop - m.start for m in plan.moves if m.sender // 2 != m.receiver // 2) == crossing


def test_partial_values_become_cuts_first() -> None:
    def reduced(text: str, axis_sizes: tuple[int, ...], shape: tuple[int, ...]) -> str:
        return " → ".join(map(str, reduction_layouts(Layout.parse(text, axis_sizes, shape))))

    assert reduced("P S0", (2, 2), (8, 6)) == "S1 S0"
    assert reduced("S0 P", (2, 2), (20, 6)) == "S0 S0"
    assert reduced("P S0", (2, 2), (8,)) == "S0@1 S0@0"
    assert reduced("P SS0/2", (2, 2), (8,)) == "R SS0/2"
    assert reduced("P P(max)", (2, 2), ()) == "P R → R R"
    assert reduced("P P(max)", (4, 2), (8, 6)) == "P S0 → S1 S0"
    assert reduced("R S0", (4, 2), (8, 6)) == ""


def test_the_same_in_every_process() -> None:
    program = (
        "from meshwright.mesh.layout import Layout\n"
        "from meshwright.reshard.transfer_plan import plan_transfer\n"
        "src, dst = Layout.parse('R S0', (2, 2), (7, 9)), Layout.parse('S1', (3,), (7, 9))\n"
        "print(plan_transfer(src, dst, src_ranks=[5, 1, 3, 0], dst_ranks=[1, 7, 2]).to_json())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def swap(plan: TransferPlan, change: Callable[[list[Move]], object]) -> TransferPlan:
    moves = list(plan.moves)
    change(moves)
    return replace(plan, moves=tuple(moves))


def takes_more(moves: list[Move]) -> None:
    """The last holder of the part sends what the first one sends to the same receiver."""
    first = moves[0]
    moves.append(replace(first, sender=2))


def unbalanced(moves: list[Move]) -> None:
    """Rank 0 sends all that rank 2, which holds the same, was to send."""
    moves[:] = [replace(move, sender=0) if move.sender == 2 else move for move in moves]


FAULTS: dict[str, tuple[Callable[[list[Move]], object], str]] = {
    "received twice": (takes_more, "twice"),
    "one element twice": (lambda m: m.append(Move(2, m[0].receiver, 0, 1)), "twice"),
    "a message is missing": (lambda m: m.pop(3), "receives|missing"),
    "an element is missing": (lambda m: m.append(replace(m.pop(0), start=1)), "missing"),
    "the last element is missing": (lambda m: m.append(replace(one := m.pop(0), stop=one.stop - 1)), "missing"),
    "sent by a rank that does not hold it": (lambda m: m.append(replace(m.pop(0), sender=1)), "twice|missing|itself"),
    "sent by a rank of no mesh": (lambda m: m.append(replace(m.pop(0), sender=11)), "source mesh"),
    "more than both hold": (lambda m: m.append(replace(m.pop(0), stop=10_000)), "part of what both ranks hold"),
    "to a wrong rank": (lambda m: m.append(replace(m.pop(0), receiver=m[-1].receiver)), "twice|missing|receives"),
    "to a rank of no mesh": (lambda m: m.append(replace(m.pop(0), receiver=11)), "destination"),
    "nothing is sent": (lambda m: m.append(Move(0, 4, 5, 5)), "a message is a non-empty part"),
    "one sender for two": (unbalanced, "could send"),
}


@pytest.mark.parametrize("name", list(FAULTS))
@pytest.mark.parametrize("first", [4, 2])
def test_seeded_faults_are_found(name: str, first: int) -> None:
    change, words = FAULTS[name]
    plan = trainer_to_inference(first)
    with pytest.raises(LayoutError, match=words):
        verify_transfer(swap(plan, change))


@pytest.mark.parametrize("name", ["bytes_sent", "bytes_received", "lower_bound_bytes", "even_share_bytes"])
def test_false_sums_are_found(name: str) -> None:
    plan = trainer_to_inference(4)
    with pytest.raises(LayoutError, match=name):
        verify_transfer(replace(plan, **{name: getattr(plan, name) - 2}))


def test_what_a_rank_has_is_not_sent_to_it() -> None:
    plan = trainer_to_inference(2)
    with pytest.raises(LayoutError, match="has itself"):
        verify_transfer(swap(plan, lambda moves: moves.append(Move(0, 2, 0, 12))))


SRC, DST = Layout.parse("R S0", (2, 2), (8, 8)), Layout.parse("S1", (4,), (8, 8))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "another shape": (
        lambda: plan_transfer(SRC, Layout.parse("S1", (4,), (8, 9)), src_ranks=range(4), dst_ranks=range(4)),
        "shape",
    ),
    "too few ranks": (lambda: plan_transfer(SRC, DST, src_ranks=range(3), dst_ranks=range(4)), "src_ranks"),
    "a rank twice": (lambda: plan_transfer(SRC, DST, src_ranks=range(4), dst_ranks=[4, 5, 6, 6]), "dst_ranks"),
    "partial values at the end": (
        lambda: plan_transfer(DST, Layout.parse("P S0", (2, 2), (8, 8)), src_ranks=range(4), dst_ranks=range(4)),
        "partial",
    ),
    "no such type": (lambda: plan_transfer(SRC, DST, src_ranks=range(4), dst_ranks=range(4), dtype="f"), "dtype"),
    "no node": (
        lambda: plan_transfer(SRC, DST, src_ranks=range(4), dst_ranks=range(4), devices_per_node=0),
        "devices_per_node",
    ),
    "not a plan": (lambda: TransferPlan.from_json("{}"), "not a plan"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_input_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(LayoutError, match=words):
        call()


def test_a_thousand_ranks() -> None:
    src, dst = Layout.parse("R S0 S1", (4, 8, 32), (4096, 4096)), Layout.parse("S1 S0", (64, 16), (4096, 4096))
    plan = plan_transfer(src, dst, src_ranks=range(1024), dst_ranks=range(512, 1536), devices_per_node=8)
    verify_transfer(plan)
    assert plan.bytes_sent == plan.even_share_bytes
    assert plan.bytes_received == plan.lower_bound_bytes
