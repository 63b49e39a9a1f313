"""Plans run on real data: every rank ends with what slicing gives it, replicas with the same bits."""

from __future__ import annotations

import random
import threading
import time
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.plan import clear_cache, plan
from meshwright.reshard.planner.steps import Step, StepKind
from meshwright.reshard.run import execute as execute_room
from meshwright.reshard.run.compile_step import compile_step
from meshwright.reshard.run.execute import execute
from meshwright.reshard.run.process_groups import groups_of, prepare
from meshwright_bench.byte_counters import LiveBytes
from tests.reshard.moves import before, direct, fold, part, plan_of, value

WORDS = ["R", "S0", "S1", "P"]
OTHERS = ["S0@1 S0@0", "S1@1 S1@0", "SS0/2 S0", "SS0/3 S1", "S0 SS0/2", "R SS1/3", "P(avg) S0", "P(max) P(max)"]
OTHERS += ["S1 P(min)", "P(product) R", "P(avg) P", "P(max) P(min)", "R P(avg)", "P(min) S0", "P(product) P(product)"]


def everything():
    return [" ".join(pair) for pair in product(WORDS, WORDS)]


def makes_mixed(src, dst):
    """It would make partial values of several reductions in one step, which a partition does not."""
    kinds = {"sum" if r == "avg" else r for axis, r in enumerate(dst.partial) if r and src.partial[axis] != r}
    return len(kinds) > 1


def moved(rank, world_size, axis_sizes, shape, pairs, planned, dtype=torch.float32):
    """The number of pairs tried; raises at the first that is wrong."""
    mesh = init_device_mesh("cpu", axis_sizes)
    groups = groups_of(mesh)
    count = 0
    for source, target in pairs:
        src, dst = Layout.parse(source, axis_sizes, shape), Layout.parse(target, axis_sizes, shape)
        if not planned and makes_mixed(src, dst):
            continue
        x = before(src, rank, dtype)
        kept = x.clone()
        how = plan(src, dst, dtype="fp32") if planned else direct(src, dst)
        y = execute(how, x, groups)
        assert equal(x, kept), f"{source} → {target}: the source was changed"
        check(y, src, dst, rank, dtype, f"{source} → {target}, {how.steps}")
        count += 1
    return count


def check(y, src, dst, rank, dtype, words):
    want = part(value(src, dtype), dst, rank)
    if dst.partial_axes():
        parts = [None] * src.num_ranks()
        dist.all_gather_object(parts, y.to(SENT_AS.get(dtype, dtype)))
        y = fold(parts, dst, dst.coordinate(rank)).to(dtype)
    assert y.shape == want.shape, f"{words}: {y.shape}, not {want.shape}"
    assert y.dtype == want.dtype
    assert equal(y, want), f"{words}: {y} is not {want}"


def equal(x, y):
    """`torch.equal`, of complex32 too."""
    return torch.equal(*(torch.view_as_real(z) if z.is_complex() else z for z in (x, y)))


PAIRS = list(product(everything(), everything()))
OTHER_PAIRS = [pair for word in OTHERS for pair in ((word, "S1 S0"), ("S1 S0", word), (word, "R R"), ("R R", word))]


def test_pairs_on_two_axes_in_one_exchange(gang):
    assert gang(4).run(moved, (2, 2), (5, 3), PAIRS[::11] + OTHER_PAIRS[::3], False, timeout_s=120)[0] > 30


def test_pairs_on_two_axes_by_plans(gang):
    pairs = OTHER_PAIRS[1::3] + [p for p in PAIRS if "P" in p[1]][::7]
    assert gang(4).run(moved, (2, 2), (5, 3), pairs, True, timeout_s=120)[0] > 30


@pytest.mark.slow
@pytest.mark.parametrize("planned", [False, True], ids=["direct", "planned"])
def test_more_pairs_on_two_axes(gang, planned):
    """A third of all, another one by plans: each has every change on each axis."""
    pairs = PAIRS[planned::3] + OTHER_PAIRS[2::3]
    assert gang(4).run(moved, (2, 2), (4, 6), pairs, planned, timeout_s=120)[0] > 80


@pytest.mark.slow
def test_pairs_on_three_axes(gang):
    words = [" ".join(choice) for choice in product(WORDS, repeat=3)]
    pairs = list(product(words, words))[::401] + [("S0@2 S0@0 S0@1", "S1 S0 S0"), ("P S1 SS0/3", "S0 SS0/2 R")]
    assert gang(8).run(moved, (2, 2, 2), (9, 5), pairs, True, timeout_s=120)[0] == len(pairs)


TYPES = [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int16, torch.uint8,
         torch.bool, torch.complex64, torch.complex32, torch.uint16, torch.uint32, torch.uint64]  # fmt: skip
SENT_AS = {torch.float8_e4m3fn: torch.float32, torch.complex32: torch.complex64}
"""Types that cannot be pickled, or added up, and others that hold the same values."""
UNREDUCED = (torch.uint16, torch.uint32, torch.uint64)


def types(rank, world_size, num_targets):
    """Exchanges, gathers and reductions of every type that has them; those that it has not are refused."""
    count = 0
    for at, dtype in enumerate(TYPES):
        targets = ("S1 S0", "R R")[at % 2 :][:1] if num_targets == 1 else ("S1 S0", "R R")
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        refused = {"P(avg)"} if is_whole or dtype is torch.complex32 else set()
        refused |= {"P"} if dtype is torch.bool else {"P(max)", "P(min)"} if dtype.is_complex else set()
        words = ["S0", "P", "P(avg)", "P(max)", "P(min)", "P(product)"]
        refused |= set(words[1:]) if dtype in UNREDUCED else set()
        pairs = [(f"{word} S1", target) for word in words if word not in refused for target in targets]
        back = [("R R", f"{word} S1") for word in words if word not in refused]
        count += moved(rank, world_size, (2, 2), (4, 3), pairs + back, planned=True, dtype=dtype)
        groups = groups_of(init_device_mesh("cpu", (2, 2)))
        for word in refused:
            src, dst = (Layout.parse(text, (2, 2), (4, 3)) for text in (f"{word} R", "R R"))
            with pytest.raises(LayoutError, match="cannot be reduced"):
                execute(plan(src, dst), torch.zeros(4, 3, dtype=dtype), groups)
            with pytest.raises(LayoutError, match="cannot be reduced"):
                execute(plan(dst, src), torch.zeros(4, 3, dtype=dtype), groups)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("num_targets", [1, 2])
def test_every_type_of_elements(gang, num_targets):
    """The types take turns at one target, or have both."""
    assert gang(4).run(types, num_targets, timeout_s=120)[0] > 50 * num_targets


def shapes(rank, world_size):
    """Scalars, empty tensors, more ranks than rows, and tensors that do not lie in order."""
    mesh = init_device_mesh("cpu", (2, 2))
    groups = groups_of(mesh)
    for shape in ((), (0, 3), (1, 1), (3,)):
        words = ["R", "P", *(f"S{dim}" for dim in range(len(shape)))]
        pairs = [pair for pair in product([f"{a} {b}" for a in words for b in words], repeat=2) if "P" not in pair[1]]
        moved(rank, world_size, (2, 2), shape, pairs[::4], planned=True)
        moved(rank, world_size, (2, 2), shape, pairs[1::5], planned=False)
    for source, target in (("S0 S1", "S1 S0"), ("S0 R", "R R"), ("R P", "S0 R"), ("R R", "S1 S0"), ("P P", "R R")):
        src, dst = (Layout.parse(text, (2, 2), (4, 6)) for text in (source, target))
        x = before(src, rank)
        for lying in (x.t().contiguous().t(), x.repeat_interleave(2, 0)[::2], torch.stack([x, x])[1]):
            assert torch.equal(execute(plan(src, dst), lying, groups), part(value(src), dst, rank))
    src, dst = Layout.parse("S0 R", (2, 2), (4, 6)), Layout.parse("S1 R", (2, 2), (4, 6))
    with pytest.raises(LayoutError, match="its shard has shape"):
        execute(plan(src, dst), torch.zeros(4, 6), groups)


@pytest.mark.slow
def test_scalars_empty_tensors_and_any_strides(gang):
    gang(4).run(shapes)


def in_rounds(rank, world_size):
    groups = groups_of(init_device_mesh("cpu", (2, 2)))
    for source, target, kind, axes in (
        ("S0 S1", "S1 S0", StepKind.ALL_TO_ALL, (0, 1)),
        ("P S1", "S0 S1", StepKind.REDUCE_SCATTER, (0,)),
        ("P P", "R R", StepKind.ALL_REDUCE, (0, 1)),
        ("S0 S1", "R R", StepKind.ALL_GATHER, (0, 1)),
        ("S0 S0", "R S0", StepKind.ALL_TO_ALL, (0, 1)),
        ("S0@1 S0@0", "S0 S0", StepKind.PERMUTE, (0, 1)),
    ):
        src, dst = (Layout.parse(text, (2, 2), (7, 9)) for text in (source, target))
        for rounds in (1, 2, 3, 20):
            step = Step(kind, axes, src, dst, 0, 0, 0.0, 0, rounds)
            y = execute(plan_of(step), before(src, rank), groups)
            assert torch.equal(y, part(value(src), dst, rank)), (source, target, rounds)


def test_rounds_end_with_the_same(gang):
    gang(4).run(in_rounds)


def peak_of(how, x, groups):
    """The most bytes that were alive at once, of what the plan's steps hold.

    gloo's threads let go of a collective's buffers a moment after it is over, which is no part of the plan: each
    collective returns here once they have.
    """
    live = LiveBytes()
    with live, pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_rows_into", "all_to_all_into"):
            patch.setattr(execute_room, name, let_go(getattr(execute_room, name), live))
        execute(how, x, groups)
    return live.peak


def uses_of(x):
    """How many hold the tensor, or its memory: a view of it that somebody made holds the memory alone."""
    return x._use_count() + torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def let_go(collective, live):
    """The collective, which ends when nobody else holds its tensors, nor what it allocated itself."""

    def called(*tensors, **options):
        given = [x for x in tensors if x is not None]
        before, uses = live.now, sum(map(uses_of, given))
        collective(*tensors, **options)
        deadline = time.monotonic() + 60
        while live.now > before or sum(map(uses_of, given)) > uses:
            assert time.monotonic() < deadline, "its buffers are never let go"
            time.sleep(0.001)

    return called


def capped(rank, world_size, pairs):
    """By pair: the most bytes that were alive, source included, the plan's count, and the cap, at several caps."""
    groups, found = groups_of(init_device_mesh("cpu", (2, 2))), []
    for source, target in pairs:
        src, dst = (Layout.parse(text, (2, 2), (256, 192)) for text in (source, target))
        free = plan(src, dst, dtype="fp32")
        for cap in (None, *(int(free.peak_bytes * share) for share in (0.9, 0.75))):
            try:
                how = plan(src, dst, dtype="fp32", memory_cap_bytes=cap)
            except LayoutError:
                continue
            x = before(src, rank)
            found.append((f"{source} → {target}, {cap}", peak_of(how, x, groups) + x.nbytes, how.peak_bytes, cap))
    return found


def test_measured_peaks_stay_under_the_plans_and_the_cap(gang):
    pairs = [("S0 S1", "S1 S0"), ("S0 S0", "R R"), ("P P", "S0 S1"), ("P S0", "R R")]
    found = [one for rank in gang(4).run(capped, pairs, timeout_s=120) for one in rank]
    assert sum(cap is not None for *_, cap in found) >= 12
    for words, measured, planned, cap in found:
        assert measured <= planned <= (cap or planned), words


def meetings(rank, world_size):
    """Steps over several axes of a part of the ranks: refused, and fine once they are prepared."""
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    mesh = whole["b", "c"]
    src, dst = (Layout.parse(text, (2, 2), (6, 4)) for text in ("S0 S1", "S1 S0"))
    how, x = plan(src, dst), before(src, rank % 4)
    with pytest.raises(LayoutError, match=r"prepare\(mesh\)"):
        execute(how, x, groups_of(mesh))
    prepare(mesh)
    first = groups_of(mesh).of((0, 1)).group
    prepare(mesh)
    assert groups_of(mesh).of((0, 1)).group is first, "made twice"
    assert groups_of(whole["b", "c"]).of((0, 1)).group is first, "a mesh like it is prepared too"
    wanted = part(value(src), dst, rank % 4)
    assert torch.equal(execute(how, x, groups_of(mesh)), wanted)
    own = prepare(mesh, own=True)
    assert own.of((0, 1)).group is not first
    assert torch.equal(execute(how, x, own), wanted)
    return dist.get_process_group_ranks(first)


@pytest.mark.slow
def test_a_part_of_the_ranks_is_prepared(gang):
    assert gang(8).run(meetings) == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


def turned(rank, world_size):
    """A mesh whose ranks do not ascend."""
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
    place = [3, 1, 0, 2].index(rank)
    for source, target in (("S0 S1", "S1 S0"), ("S0 R", "R R"), ("S0 S0", "R R"), ("P P", "R S1"), ("R P", "R R")):
        src, dst = (Layout.parse(text, (2, 2), (6, 5)) for text in (source, target))
        y = execute(plan(src, dst), before(src, place), groups_of(mesh))
        assert torch.equal(y, part(value(src), dst, place)), (source, target)


def test_ranks_need_not_ascend(gang):
    gang(4).run(turned)


MIN_ROUNDS = 2
"""A loaded machine may take all of the time for less."""


def threads(rank, world_size):
    """How often each thread went round: planning, executing in groups of its own; and forgetting what is cached."""
    meshes = [init_device_mesh("cpu", (2, 2)) for _ in range(3)]
    lanes = [prepare(mesh, own=True) for mesh in meshes]
    layouts = [Layout.parse(text, (2, 2), (6, 4)) for text in ("S0 S1", "S1 S0", "R R", "S0 S0", "P P", "S1 R")]
    pairs = [(a, b) for a, b in product(layouts, layouts) if not b.partial_axes()]
    stop, counts, errors = threading.Event(), [0] * (len(lanes) + 1), []

    def work(lane):
        try:
            order = random.Random(lane).sample(pairs, len(pairs))
            while counts[lane] < MIN_ROUNDS or not agreed_to_stop(lanes[lane], stop):
                for src, dst in order:
                    y = execute(plan(src, dst), before(src, rank), lanes[lane])
                    assert torch.equal(y, part(value(src), dst, rank))
                counts[lane] += 1
        except BaseException as error:
            errors.append(error)
            raise

    def forget():
        while not stop.wait(0.001):
            clear_cache()
            compile_step.cache_clear()
            counts[-1] += 1

    workers = [threading.Thread(target=work, args=(lane,)) for lane in range(len(lanes))]
    other = threading.Thread(target=forget)
    for thread in (*workers, other):
        thread.start()
    time.sleep(0.3)
    stop.set()
    for thread in (*workers, other):
        thread.join()
    assert not errors, errors
    return counts


def agreed_to_stop(lane, stop):
    """All ranks' threads of a lane stop after the same round."""
    wishes = torch.tensor([float(stop.is_set())])
    dist.all_reduce(wishes, group=lane.of((0, 1)).group)
    return bool(wishes)


def test_threads_plan_execute_and_forget_at_once(gang):
    for counts in gang(4).run(threads, timeout_s=120):
        assert min(counts[:-1]) >= MIN_ROUNDS and counts[-1] >= 1


def folds_in_order(rank, world_size, dtype):
    """Each result beside the fold of all ranks' values from rank 0 up, in float32 at least."""
    groups = groups_of(init_device_mesh("cpu", (4,)))
    values = [torch.randn(70, 1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)]
    wide = [x.to(torch.promote_types(dtype, torch.float32)) for x in values]
    whole = (((wide[0] + wide[1]) + wide[2]) + wide[3]).to(dtype)
    found = []
    for target, kind in (("R", StepKind.ALL_REDUCE), ("S0", StepKind.REDUCE_SCATTER), ("S1", StepKind.REDUCE_SCATTER)):
        src, dst = (Layout.parse(text, (4,), (70, 1000)) for text in ("P", target))
        y = execute(plan_of(Step(kind, (0,), src, dst, 0, 0, 0.0, 0)), values[rank], groups)
        found.append(torch.equal(y, part(whole, dst, rank)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_values_are_reduced_from_the_first_rank_up(gang, dtype):
    assert gang(4).run(folds_in_order, dtype) == [[True] * 3] * 4


REDUCTIONS = ("P", "P(avg)", "P(max)", "P(min)", "P(product)")
SHAPE = (3, 2)


def layouts(axis_sizes, words):
    return [Layout.parse(" ".join(chosen), axis_sizes, SHAPE) for chosen in product(words, repeat=len(axis_sizes))]


def is_set(src, dst):
    """Copies, and perhaps parts, become partial; what is partial stays so."""
    kept = all(r is None or r == dst.partial[axis] for axis, r in enumerate(src.partial))
    return (
        kept
        and dst.partial != src.partial
        and all(
            split in dst.splits[dim] or dst.partial[split.axis]
            for dim, splits in enumerate(src.splits)
            for split in splits
        )
    )


def check_partial(src, dst, how, dtype=torch.float64):
    """Every rank's share, folded, is the value."""
    parts = [execute(how, before(src, rank, dtype), SimpleNamespace(rank=rank)) for rank in range(src.num_ranks())]
    whole = value(src, dtype)
    for rank in range(src.num_ranks()):
        found = fold(parts, dst, dst.coordinate(rank))
        assert torch.equal(found.to(dtype), part(whole, dst, rank)), f"{src} → {dst}, rank {rank}"


@pytest.mark.slow
def test_plans_make_any_reductions_beside_any_others():
    """Those that reduce nothing first, for want of ranks to do it on."""
    count = 0
    for axis_sizes, every in (((2, 3), 1), ((2, 2, 2), 11)):
        sources, targets = layouts(axis_sizes, ("R", "P", "P(product)", "P(max)")), layouts(axis_sizes, REDUCTIONS)
        for src, dst in [pair for pair in product(sources, targets) if is_set(*pair)][::every]:
            how = plan(src, dst)
            if {one.kind for one in how.steps} == {StepKind.PARTITION}:
                check_partial(src, dst, how)
                count += 1
    assert count > 60


def partition_step(source, target, axis_sizes):
    src, dst = (Layout.parse(text, axis_sizes, SHAPE) for text in (source, target))
    return src, dst, plan_of(Step(StepKind.PARTITION, (), src, dst, 0, 0, 0.0, 0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inner", REDUCTIONS)
def test_parts_become_partial_too(reduction, inner):
    for source, target in (
        (f"S0 {inner}", f"{reduction} {inner}"),
        (f"{inner} S0", f"{inner} {reduction}"),
        (f"S0 {inner} {inner}", f"{reduction} {inner} {inner}"),
        (f"R {inner} S1", f"R {inner} {reduction}"),
    ):
        src, dst, how = partition_step(source, target, (2,) * len(source.split()))
        check_partial(src, dst, how)


@pytest.mark.parametrize(("source", "target", "said"), [
    ("R R", "P P(max)", "cannot become partial for max and sum at once"),
    ("S0 P R", "P(product) P P(product)", "cannot become partial for product and sum at once"),
])  # fmt: skip
def test_what_one_step_cannot_make_is_refused_and_planned_in_several(source, target, said):
    src, dst, how = partition_step(source, target, (2,) * len(source.split()))
    with pytest.raises(LayoutError, match=said) as caught:
        execute(how, before(src, 0, torch.float64), SimpleNamespace(rank=0))
    assert "plan() makes such steps" in caught.value.fix
    assert len(plan(src, dst).steps) > 1


def test_whole_numbers_stay_in_their_range():
    src, dst, how = partition_step("R P", "P(max) P", (2, 2))
    check_partial(src, dst, how, torch.int8)
