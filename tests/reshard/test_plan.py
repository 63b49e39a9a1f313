"""Plans: bytes near the bound, chains that hold together, the same everywhere, within memory."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster.presets import cluster_preset
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard import Topology, clear_cache, plan
from meshwright.reshard.planner.intermediate_layouts import Problem, goal_of, make_step, partition_stages
from meshwright.reshard.planner.plan import one_axis_forms, one_axis_path
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, StepKind, dtype_bytes
from meshwright.reshard.run.shard_exchange import messages_received, messages_sent
from meshwright.reshard.verify_plan import verify
from meshwright_bench.reshard.random_layouts import sample_layout, sample_pairs
from tests.reshard.by_hand import staging_elements

ROWS = [
    # mesh, shape, from, to, MB that the better of PyTorch 2.13's planners receives, and the bound
    ((4, 8), (8192, 8192), "S0 S1", "S1 S0", 27.3, 4.19),
    ((4, 8), (8192, 8192), "S0 S0", "S1 S1", 34.6, 4.06),
    ((4, 8), (8192, 8192), "S0 S0", "R S0", 30.9, 16.8),
    ((4, 8), (8192, 8192), "S0@1 S0@0", "S0 S0", 30.9, 4.19),
    ((4, 8), (8192, 8192), "R S0", "S0 R", 44, 33.6),
    ((2, 8, 8), (8192, 16384), "S0 S1 S0", "S1 S0 S1", 40.6, 2.1),
    ((2, 8, 8), (8192, 16384), "P R P", "S0 R S1", 62.7, 46.1),
    ((2, 2, 4, 8), (8192, 16384), "S0 S1 S0 S1", "S1 S0 S1 S0", 37.2, 2.1),
    ((2, 2, 4, 8), (32768, 32768), "S0 S0 S0 R", "R S1 S0 S0", 73.4, 33.6),
]


@pytest.mark.parametrize(("mesh", "shape", "src", "dst", "theirs", "bound"), ROWS)
def test_rows_of_the_table_meet_the_bound(mesh, shape, src, dst, theirs, bound) -> None:
    there, back = (plan(*ends) for ends in itertools.permutations([Layout.parse(t, mesh, shape) for t in (src, dst)]))
    assert there.bytes_received <= 1.05 * there.lower_bound_bytes
    assert there.bytes_received < theirs * 1e6
    assert there.lower_bound_bytes / 1e6 == pytest.approx(bound, rel=0.01)
    assert back.bytes_received <= 1.05 * back.lower_bound_bytes


def test_copies_share_the_sending() -> None:
    """Without the slice, few ranks would send to all."""
    src, dst = (Layout.parse(text, (4, 8), (8192, 8192)) for text in ("R S0", "S0 R"))
    found = plan(src, dst)
    assert [step.kind for step in found.steps] == [StepKind.SLICE, StepKind.ALL_TO_ALL]
    assert found.bytes_sent == found.bytes_received == found.lower_bound_bytes


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        ("S0 R", "S0 R", []),
        ("R R", "S0 S1", ["slice"]),
        ("S0 S1", "P P", ["partition"]),
        ("P(max) R", "P(max) S0", ["slice"]),
        ("S0 S0", "S0@1 S0@0", ["permute"]),
        ("S0 S1", "R S1", ["all-gather"]),
        ("P R", "S0 R", ["reduce-scatter"]),
        ("P(max) P", "P(max) S0", ["reduce-scatter"]),
    ],
)
def test_kinds_of_simple_plans(src: str, dst: str, kinds: list[str]) -> None:
    found = plan(*(Layout.parse(text, (2, 4), (64, 4096)) for text in (src, dst)))
    assert [str(step.kind) for step in found.steps] == kinds


@pytest.mark.parametrize(("src", "dst"), [("P", "R"), ("R", "P(avg)"), ("P(max)", "P"), ("R", "R")])
def test_a_scalar_is_a_tensor(src: str, dst: str) -> None:
    check(plan(*(Layout.parse(text, (3,), ()) for text in (src, dst))))


@pytest.mark.parametrize(("src", "dst"), [("R R", "P(max) P"), ("S0 S0", "P(product) P"), ("P S0", "P(max) P(min)")])
def test_partial_values_of_different_kinds_are_set_from_the_outside_in(src: str, dst: str) -> None:
    found = plan(*(Layout.parse(text, (2, 3), (12,)) for text in (src, dst)))
    check(found)
    assert [step.kind for step in found.steps[-2:]] == [StepKind.PARTITION] * 2


def test_small_values_are_reduced_in_one_step_and_large_ones_in_two() -> None:
    ends = [[Layout.parse(text, (8,), shape) for text in ("P", "R")] for shape in ((16,), (8192, 8192))]
    kinds = [[step.kind for step in plan(*pair).steps] for pair in ends]
    assert kinds == [[StepKind.ALL_REDUCE], [StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER]]


def test_an_inner_reduction_cannot_be_kept_while_an_outer_one_of_another_kind_is_reduced() -> None:
    """max over axis 0 of (sum over axis 1): the sums come first."""
    src, dst = (Layout.parse(text, (2, 4), (64, 64)) for text in ("P(max) P", "S0 P"))
    steps = plan(src, dst).steps
    assert all(step.dst.partial_axes() == () for step in steps if step.kind is StepKind.REDUCE_SCATTER)
    assert steps[-1].kind is StepKind.PARTITION
    commuting = plan(*(Layout.parse(text, (2, 4), (64, 64)) for text in ("P(avg) P", "S0 P")))
    assert [step.kind for step in commuting.steps] == [StepKind.REDUCE_SCATTER]


@st.composite
def small_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    rng = draw(st.randoms(use_true_random=False))
    axis_sizes = draw(st.sampled_from([(2,), (3,), (2, 3), (4, 2), (3, 1, 2), (2, 2, 2), (2, 2, 1, 3)]))
    shape = draw(st.lists(st.sampled_from([0, 1, 4, 7, 12, 64]), min_size=1, max_size=3))
    return sample_layout(rng, axis_sizes, shape), sample_layout(rng, axis_sizes, shape)


def check(found: ReshardPlan) -> None:
    """Steps follow each other, do what their kinds say, and count what the lists of pieces count."""
    size, src = dtype_bytes(found.dtype), found.src
    ranks, ends = range(src.num_ranks()), [found.src, *(step.dst for step in found.steps)]
    sent_by, received_by = np.zeros((2, src.num_ranks()), np.int64)
    assert all(step.src.same_as(end) for step, end in zip(found.steps, ends, strict=False))
    assert ends[-1].same_as(found.dst)
    for step in found.steps:
        out, come, held = np.zeros((3, src.num_ranks()), np.int64)
        for rank in ranks if step.kind not in LOCAL else ():
            out[rank] = sum(piece.numel() for piece in messages_sent(step, rank) if piece.receiver != rank)
            come[rank] = sum(piece.numel() for piece in messages_received(step, rank) if piece.sender != rank)
            held[rank] = staging_elements(step, rank, step.rounds)
        held += src.local_numels() + step.dst.local_numels()
        held += 0 if step is found.steps[0] else step.src.local_numels()
        assert (step.bytes_sent, step.bytes_received) == (out.max() * size, come.max() * size)
        assert step.live_bytes == held.max() * size <= found.peak_bytes
        sent_by, received_by = sent_by + out, received_by + come
    assert (found.bytes_sent, found.bytes_received) == (sent_by.max() * size, received_by.max() * size)
    assert found.bytes_received >= found.lower_bound_bytes
    assert found.time_us == pytest.approx(sum(step.time_us for step in found.steps))
    assert ReshardPlan.from_json(found.to_json()) == found
    verify(found)


@settings(max_examples=60)
@given(small_pairs(), st.sampled_from(["bf16", "fp64"]), st.booleans(), st.booleans())
def test_plans_hold_together(pair: tuple[Layout, Layout], dtype: str, uniform: bool, one_axis: bool) -> None:
    topology = None if uniform else Topology.of(cluster_preset("H100"), pair[0].axis_sizes)
    found = plan(*pair, dtype=dtype, topology=topology, one_axis=one_axis)
    check(found)
    assert not one_axis or all(len(step.axes) <= 1 for step in found.steps)


@settings(max_examples=30)
@given(small_pairs(), st.floats(0, 1), st.booleans())
def test_a_cap_is_kept_or_the_smallest_one_is_named(pair: tuple[Layout, Layout], share: float, one_axis: bool) -> None:
    free = plan(*pair, one_axis=one_axis)
    ends = int((pair[0].local_numels() + pair[1].local_numels()).max()) * 2 if free.steps else free.peak_bytes
    cap = int(ends + share * (free.peak_bytes - ends))
    try:
        found = plan(*pair, memory_cap_bytes=cap, one_axis=one_axis)
    except LayoutError as e:
        least = int(e.fix.split("=")[1].split()[0])
        assert least > cap
        cap = least
        found = plan(*pair, memory_cap_bytes=cap, one_axis=one_axis)
        with pytest.raises(LayoutError, match="no plan"):
            plan(*pair, memory_cap_bytes=least - 1, one_axis=one_axis)
    check(found)
    assert found.peak_bytes <= cap and found.time_us >= free.time_us


def test_rounds_only_where_the_cap_demands_them() -> None:
    src, dst = (Layout.parse(text, (4, 8), (512, 512)) for text in ("S0 S1", "S1 S0"))
    free = plan(src, dst)
    capped = plan(src, dst, memory_cap_bytes=free.peak_bytes - 1)
    assert [step.rounds for step in free.steps] == [1] and [step.rounds for step in capped.steps] == [2]
    assert capped.peak_bytes < free.peak_bytes and capped.time_us > free.time_us


def test_other_tensors_and_meshes_are_refused() -> None:
    a = Layout.parse("S0 R", (2, 2), (4,))
    with pytest.raises(LayoutError, match="one of shape|of shape"):
        plan(a, Layout.parse("S0 R", (2, 2), (5,)))
    with pytest.raises(LayoutError, match="on a mesh of"):
        plan(a, Layout.parse("S0", (4,), (4,)))


HISTORY = """
import sys, hashlib, itertools
from meshwright.reshard import plan
from meshwright_bench.reshard.random_layouts import sample_pairs
for src, dst in itertools.islice(sample_pairs(2, int(sys.argv[1])), int(sys.argv[1]) * 3):
    plan(src, dst)
text = [plan(*ends).to_json() for axes in (2, 3, 4) for ends in itertools.islice(sample_pairs(axes, 0), 6)]
assert "torch" not in sys.modules
print(hashlib.sha256("".join(text).encode()).hexdigest())
"""


def test_plans_do_not_depend_on_hash_seeds_or_on_the_past() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", HISTORY, str(seed)],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
        )
        for seed in range(2)
    ]
    try:
        texts = {run.communicate(timeout=300)[0] for run in runs}  # a limit for what hangs, not for a loaded machine
    finally:
        for run in runs:
            run.kill()
    assert len(texts) == 1
    assert all(run.returncode == 0 for run in runs)


def test_planning_while_others_clear() -> None:
    pairs = list(itertools.islice(sample_pairs(2, 6), 12))
    want, stop, wrong = [plan(*pair) for pair in pairs], threading.Event(), []

    def ask(first: int) -> None:
        at = first
        while not stop.is_set():
            if plan(*pairs[at % len(pairs)]) != want[at % len(pairs)]:
                wrong.append(at)
            at += 1

    def forget() -> None:
        while not stop.is_set():
            clear_cache()
            time.sleep(0.001)

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(6)] + [threading.Thread(target=forget)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    stop.set()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


A, B = (Layout.parse(text, (2, 2), (64, 64)) for text in ("S0 S1", "S1 S0"))


def error_of(*ends: Any, **arguments: Any) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        plan(*ends, **arguments)
    assert caught.value.what and caught.value.where and caught.value.rule and caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("cap", "fix"),
    [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("100kb", 10**5), ("64M", 64 * 10**6), (2e9, 2 * 10**9),
     ("30000", 30000), ("lots", None), (True, None), ([1], None), (float("inf"), None), (-1.0, None)],
)  # fmt: skip
def test_a_cap_is_a_whole_number_of_bytes(cap: Any, fix: int | None) -> None:
    error = error_of(A, B, memory_cap_bytes=cap)
    assert error.where == "memory_cap_bytes" and repr(cap) in error.what
    assert error.fix == f"memory_cap_bytes={fix}"
    plan(A, B, memory_cap_bytes=fix)


def test_a_cap_of_numpy_is_one() -> None:
    assert plan(A, B, memory_cap_bytes=np.int64(10**6)) is plan(A, B, memory_cap_bytes=10**6)


@pytest.mark.parametrize("topology", ["H100", "b200", "nothing", 5, ["H100"], cluster_preset("H100")])
def test_a_topology_is_made_of_a_cluster(topology: Any) -> None:
    import meshwright.cluster.presets

    error = error_of(A, B, topology=topology)
    assert error.where == "topology"
    if isinstance(topology, str) and topology != "nothing":
        assert repr(topology) in error.fix
    expression = error.fix.removeprefix("topology=").replace("the same cluster", "cluster")
    names = {"meshwright": meshwright, "Topology": Topology, "cluster": topology}
    plan(A, B, topology=eval(expression, names))


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [("float32", "fp32"), ("bfloat16", "bf16"), ("INT64", "int64"), ("bf17", "bf16"), (None, "bf16"),
     (["fp32"], "bf16"), (4, "bf16")],
)  # fmt: skip
def test_a_dtype_is_a_name(dtype: Any, fix: str) -> None:
    error = error_of(A, B, dtype=dtype)
    assert error.where == "dtype" and error.fix == f"dtype={fix!r}"
    plan(A, B, dtype=fix)


def test_a_dtype_of_torch_has_a_name() -> None:
    import torch

    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.bool, "bool"), (torch.half, "fp16")):
        assert error_of(A, B, dtype=dtype).fix == f"dtype={name!r}"


@pytest.mark.parametrize(("ends", "where"), [(("S0 S1", B), "src"), ((A, "S1 S0"), "dst"), ((None, B), "src")])
def test_ends_are_layouts(ends: tuple[Any, Any], where: str) -> None:
    error = error_of(*ends)
    assert error.where == where and "Layout.parse(" in error.fix


@pytest.mark.parametrize("num_axes", [2, 3, 4])
def test_it_costs_no_more_than_the_way_that_is_always_open(num_axes: int) -> None:
    for src, dst in itertools.islice(sample_pairs(num_axes, 7), 12):
        ends = src.canonical(), dst.canonical()
        problem = Problem(*ends, 2, Topology.uniform(num_axes), one_axis=True)
        goal, at, time_us = goal_of(*ends), ends[0], 0.0
        for to in [*one_axis_path(ends[0], goal), *partition_stages(goal, ends[1])]:
            if to != at:
                step = make_step(problem, at, to)
                assert step is not None, f"{at} → {to} is not a step of one axis"
                time_us, at = time_us + step.time_us, to
        assert at == ends[1]
        assert plan(src, dst, one_axis=True).time_us <= time_us + 0.001


@pytest.mark.parametrize(
    ("src", "dst", "most"),
    [
        ("S0 S1", "S1 S0", 2),  # gathered along one axis, not both
        ("S0 S0", "S1 S1", 4 / 3),  # never gathered
        ("P P", "S0 S1", 1),
        ("R S0", "S0 R", 1),
    ],
)
def test_bytes_beside_those_of_merged_axes(src: str, dst: str, most: float) -> None:
    ends = [Layout.parse(text, (2, 2), (64, 64)) for text in (src, dst)]
    assert plan(*ends, one_axis=True).bytes_received <= most * plan(*ends).bytes_received


def test_without_a_choice_plans_are_those_of_merged_axes() -> None:
    """One axis alone has several ranks: nothing is forbidden, and nothing is dearer."""
    rng = random.Random(3)
    for axis_sizes in ((4,), (1, 3), (2, 1, 1)):
        for _ in range(10):
            src, dst = (sample_layout(rng, axis_sizes, (12, 7)) for _ in range(2))
            assert plan(src, dst, one_axis=True).time_us <= plan(src, dst).time_us


def test_forms_are_in_a_fixed_order_without_repetitions() -> None:
    src, dst = (Layout.parse(text, (2, 2, 2, 2, 2), (64, 64)) for text in ("S0 S1 S0 P R", "S1 S1 S0 R S0"))
    forms = one_axis_forms(src, dst)
    assert forms == one_axis_forms(src, dst) and len(set(forms)) == len(forms) < 64
