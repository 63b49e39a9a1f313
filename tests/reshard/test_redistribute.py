"""DTensors redistributed by plans: values, gradients and specs are as DTensor has them, in the context too."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _api,
    _dispatch,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.dtensor import private
from meshwright.reshard.dtensor.placements import dtensor_of, layout_of, layout_of_spec, placements_of
from meshwright.reshard.dtensor.redistribute import redistribute, redistribute_by_plan
from tests.reshard.moves import before, part, value

WORDS = ["R", "S0", "S1", "P"]
ALL = [" ".join(pair) for pair in product(WORDS, WORDS)]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def target_of(layout):
    placements, order = placements_of(layout)
    return {"placements": placements, "shard_order": order}


def both_ways(rank, world_size, axis_sizes, shape, pairs):
    """Forward and backward of every pair, against slices; raises at the first that is wrong."""
    mesh = init_device_mesh("cpu", axis_sizes)
    for source, target in pairs:
        src, dst = (Layout.parse(text, axis_sizes, shape) for text in (source, target))
        words = f"{source} → {target}"
        x = dtensor_of(before(src, rank).requires_grad_(), mesh, src)
        y = redistribute(x, **target_of(dst))
        assert layout_of(y) == dst, words
        copies = dst.with_partial(range(len(axis_sizes)), None)
        if not dst.partial_axes():
            assert torch.equal(y.to_local(), part(value(src), dst, rank)), words
        upstream = torch.arange(float(torch.Size(shape).numel())).view(shape)
        gradient = dtensor_of(part(upstream, copies, rank), mesh, copies)
        (found,) = torch.autograd.grad(y, x, gradient)
        back = src.with_partial(range(len(axis_sizes)), None)
        assert layout_of(found) == back, words
        assert torch.equal(found.to_local(), part(upstream, back, rank)), words
    return len(pairs)


ORDERED = ["S0@1 S0@0", "S1@1 S1@0", "SS0/2 S0", "SS0/3 S1", "S0 SS0/2"]


def test_values_and_gradients_of_pairs_on_two_axes(gang):
    pairs = list(product(ALL, ALL))[::7] + [p for o in ORDERED for p in ((o, "S1 S0"), ("R P", o), (o, ORDERED[0]))]
    assert gang(4).run(both_ways, (2, 2), (5, 6), pairs, timeout_s=120)[0] == len(pairs)


@pytest.mark.slow
def test_values_and_gradients_of_pairs_on_eight_ranks(gang):
    words = [" ".join(choice) for choice in product(WORDS, repeat=3)]
    pairs = list(product(words, words))[::301]
    assert gang(8).run(both_ways, (2, 2, 2), (9, 7), pairs, timeout_s=120)[0] == len(pairs)


def replicas(rank, world_size, dtype):
    """Bits of results on ranks that hold the same, of random partial values."""
    mesh, shape = init_device_mesh("cpu", (2, 2)), (33, 7)
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for source, reduction in product(("P P", "P R", "R P", "P S1"), ("sum", "avg", "product", "max")):
        src = Layout.parse(source.replace("P", f"P({reduction})"), (2, 2), shape)
        whole = torch.randn(src.local_shape(rank), generator=generator).to(dtype)
        held = [w != "R" or at == 0 for w, at in zip(source.split(), src.coordinate(rank), strict=True)]
        everyone = [None] * world_size
        dist.all_gather_object(everyone, (src.coordinate(rank), whole, all(held)))
        key = tuple(at if w != "R" else 0 for w, at in zip(source.split(), src.coordinate(rank), strict=True))
        local = next(tensor for place, tensor, _ in everyone if place == key)
        x = dtensor_of(local, mesh, src)
        for target in ([R, R], [S0, R], [S1, R], [R, S1]):
            found[source, reduction, str(target)] = redistribute(x, target)
    return {key: (layout_of(y), y.to_local().contiguous().view(torch.uint8)) for key, y in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_replicas_have_the_same_bits(gang, dtype):
    results = gang(4).run(replicas, dtype)
    for key, (layout, _) in results[0].items():
        held = {}
        for rank in range(4):
            bits = results[rank][key][1]
            assert torch.equal(held.setdefault(str(layout.local_slices(rank)), bits), bits), key


def conversions(rank, world_size):
    """Layouts of DTensors and back; their parts against DTensor's own offsets."""
    mesh = init_device_mesh("cpu", (2, 2, 1))
    whole = torch.arange(9 * 7).view(9, 7)
    kinds = [R, S0, S1, _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    for placements in product(kinds, kinds, [R, S0]):
        x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        layout = layout_of(x)
        assert torch.equal(x.to_local(), part(whole, layout, rank)), placements
        shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        slices = layout.local_slices(rank)
        assert layout.local_shape(rank) == tuple(shape)
        assert all(at == own[0].start for at, own in zip(offset, slices, strict=True) if own), placements
        assert placements_of(layout) == (tuple(placements), None)
        moved = redistribute(distribute_tensor(whole, mesh, [R, R, R]), placements)
        assert private.spec_of(moved) == private.spec_of(x)
        assert torch.equal(moved.to_local(), x.to_local())
    for reduction in ("sum", "avg", "max", "min", "product"):
        x = DTensor.from_local(whole, mesh, [Partial(reduction), R, R], run_check=False)
        assert placements_of(layout_of(x)) == (x.placements, None)


def test_conversions_are_exact(gang):
    gang(4).run(conversions)


def orders(rank, world_size):
    mesh, shape = init_device_mesh("cpu", (2, 2)), (9, 3)
    order = (ShardOrderEntry(0, (1, 0)),)
    whole = torch.arange(27).view(shape)
    x = redistribute(distribute_tensor(whole, mesh, [S0, S0]), [S0, S0], shard_order={0: [1, 0]})
    assert private.spec_of(x).shard_order == order
    assert str(layout_of(x)) == "S0@1 S0@0"
    for placements, given in (([S0, S0], {-2: [1, 0]}), ([Shard(-2), S0], [(-2, (1, 0))])):
        y = redistribute(distribute_tensor(whole, mesh, [S0, S0]), placements, shard_order=given)
        assert private.spec_of(y) == private.spec_of(x) and torch.equal(y.to_local(), x.to_local())
    assert torch.equal(x.to_local(), part(whole, layout_of(x), rank))
    assert torch.equal(redistribute(x, [R, R]).to_local(), whole)
    strided = (_StridedShard(0, split_factor=2), S0)
    explicit = DTensorSpec(mesh, strided, private.spec_of(x).tensor_meta, use_strided_shard_as_shard_order=False)
    implicit = DTensorSpec(mesh, strided, private.spec_of(x).tensor_meta)
    assert layout_of_spec(explicit) == layout_of_spec(implicit)
    messages = []
    for call in (
        lambda: redistribute(x, [S0, R], shard_order={0: [1, 0]}),
        lambda: redistribute(x, [S0, S0], shard_order={2: [1, 0]}),
        lambda: redistribute(x, [S0]),
        lambda: redistribute(x, [Shard(2), R]),
        lambda: redistribute(x, [S0, Shard(-3)]),
        lambda: redistribute(x, [R, _StridedShard(-3, split_factor=2)]),
        lambda: redistribute(x, [S0, S0], shard_order={0: [1, 0], -2: [1, 0]}),
        lambda: redistribute(x, [S0, S0], shard_order={-3: [1, 0]}),
        lambda: redistribute(x, [S0, S0], shard_order={0: 1}),
        lambda: redistribute(x, [R, R], memory_cap_bytes="2GB"),
        lambda: redistribute(x, [_MaskPartial("sum"), R]),
        lambda: redistribute(x, [Partial("bxor"), R]),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_orders_are_kept_and_mistakes_explained(gang):
    messages = gang(4).run(orders)[0]
    for message, words in zip(
        messages,
        ("axes [1, 0], the placements over axes [0]", "dim 2", "[Shard(dim=0), Replicate()]", "shards dim 2",
         "Shard(dim=-3) on mesh axis 1 shards dim -3 of a tensor with 2 dims", "shards dim -3", "names dim 0 twice",
         "dim -3", "{0: 1}", "memory_cap_bytes=2000000000", "_MaskPartial", "Partial(bxor)"),
        strict=True,
    ):  # fmt: skip
        assert words in message, message


def near_misses(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
    calls = {
        "one placement": lambda: redistribute(x, Shard(0)),
        "text": lambda: redistribute(x, "S0"),
        "a mesh": lambda: redistribute(x, mesh),
        "plain tensor": lambda: redistribute(torch.ones(2), [Shard(0)]),
        "group as mesh": lambda: redistribute(x, [Shard(0)], mesh=dist.group.WORLD),
    }
    told = {}
    for name, call in calls.items():
        with pytest.raises(LayoutError) as caught:
            call()
        told[name] = f"{caught.value.what}; {caught.value.fix}"
    fixed = eval(told["one placement"].partition("; ")[2].replace("Shard(dim=0)", "Shard(0)"), {**globals(), "x": x})
    return told, fixed.to_local().tolist()


def test_arguments_that_are_almost_right_say_what_is_wanted(gang):
    for rank, (told, local) in enumerate(gang(2).run(near_misses)):
        assert local == [0.0, 1.0, 2.0, 3.0] if rank == 0 else [4.0, 5.0, 6.0, 7.0]
        assert "placements is Shard(dim=0), mesh" in told["one placement"]
        assert "placements is 'S0'" in told["text"]
        assert "placements is DeviceMesh(" in told["a mesh"] and "mesh is a ProcessGroup" in told["group as mesh"]
        assert "x is a Tensor" in told["plain tensor"] and "; x = DTensor.from_local(" in told["plain tensor"]


def again(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    values = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    x = distribute_tensor(values, mesh, [S0, S1]).requires_grad_()
    y = redistribute(x, [S1, S0])
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    return first.full_tensor().detach(), second.full_tensor().detach(), values


def test_a_gradient_has_a_gradient(gang):
    for first, second, x in gang(4).run(again):
        assert torch.equal(first, 3 * x**2)
        assert torch.equal(second, 36 * x**3)


def forgotten(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.ones(2, 2)
    x = dtensor_of(local, mesh, Layout.parse("S0 S1", (2, 2), (4, 4)))
    y = redistribute(x, [S1, S0])
    reference = weakref.ref(mesh)
    del mesh, x, y
    gc.collect()
    return reference() is None


def test_meshes_are_not_kept(gang):
    assert all(gang(4).run(forgotten))


CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": replicate_fallback}


def contexts(rank, world_size, name):
    """DTensor's own redistributions under a context: same values and specs as without."""
    context = CONTEXTS[name]
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    a, b = torch.randn(6, 8), torch.randn(8, 5)
    theirs = _redistribute.redistribute_local_tensor

    def run():
        x = distribute_tensor(a, mesh, [S0, S1]).requires_grad_()
        w = distribute_tensor(b, mesh, [S1, S0]).requires_grad_()
        y = x @ w
        z = y.redistribute(placements=[S1, S0]) + x.sum(1, keepdim=True)
        z.square().sum().full_tensor().backward()
        return [z, x.grad, w.grad, y.redistribute(placements=[R, S0])]

    calls = []
    plain = run()
    original = private.redistribution_hook

    with pytest.MonkeyPatch.context() as patch:
        count = redistribute_by_plan
        name = "meshwright.reshard.dtensor.redistribute.redistribute_by_plan"
        patch.setattr(name, lambda *args: calls.append(args) or count(*args))
        with context():
            assert all(m.redistribute_local_tensor is not theirs for m in (_redistribute, _dispatch, _api))
            ours = run()
    assert private.redistribution_hook is original
    assert all(m.redistribute_local_tensor is theirs for m in (_redistribute, _dispatch, _api))
    for x, y in zip(plain, ours, strict=True):
        assert x.placements == y.placements
        torch.testing.assert_close(x.to_local(), y.to_local())
    return len(calls)


@pytest.mark.parametrize("name", CONTEXTS)
def test_operators_and_backward_run_by_plans_in_a_context(gang, name):
    assert gang(4).run(contexts, name)[0] > 6


def nested(rank, world_size):
    theirs = _redistribute.redistribute_local_tensor
    hooks = []
    with for_dtensor():
        with pytest.raises(ZeroDivisionError), for_dtensor():
            raise ZeroDivisionError
        hooks.append(private.active_hook() is not None)
        thread = threading.Thread(target=lambda: hooks.append(private.active_hook() is None))
        thread.start()
        thread.join()
    hooks += [private.active_hook() is None, _redistribute.redistribute_local_tensor is theirs]
    return hooks


def test_a_hook_is_kept_while_it_is_needed_and_no_longer():
    """PyTorch 2.11 takes no reference and drops one: after some rounds the function's memory would be freed."""
    hook = lambda local, current, target: None  # noqa: E731
    before = sys.getrefcount(hook)
    for _ in range(3):
        with private.redistribution_hook(hook):
            assert private.active_hook() is hook and sys.getrefcount(hook) > before
        assert sys.getrefcount(hook) == before


def test_contexts_nest_end_with_errors_and_stay_in_their_thread(gang):
    assert gang(4).run(nested)[0] == [True] * 4


def what_is_left_to_pytorch(rank, world_size):
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [S0])
    ids = distribute_tensor(torch.tensor([[1, 9, 3], [0, 7, 7]]), mesh, [R])
    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [S0])
    with for_dtensor():
        rows = torch.nn.functional.embedding(ids, weight).full_tensor()
        late = x.redistribute(placements=[R], async_op=True).to_local()
        compiled = torch.compile(lambda x: x.redistribute(placements=[R]) * 2, backend="aot_eager")(x)
    return rows, late + 0, compiled.to_local()


def test_what_has_no_layout_is_left_to_pytorch(gang):
    rows, late, compiled = gang(4).run(what_is_left_to_pytorch)[0]
    assert torch.equal(rows, torch.arange(40.0).view(10, 4)[torch.tensor([[1, 9, 3], [0, 7, 7]])])
    assert torch.equal(late, torch.arange(12.0).view(4, 3))
    assert torch.equal(compiled, 2 * late)


def without_a_reduction(rank, world_size):
    """Partial values of types that are not reduced: an error of ours, and in a context PyTorch's own affair."""
    mesh, found = init_device_mesh("cpu", (4,)), []
    cases = (torch.uint16, "sum"), (torch.uint32, "max"), (torch.uint64, "product"), (torch.complex32, "avg")
    for dtype, kind in cases:
        x = DTensor.from_local(torch.ones(4, 3).to(dtype), mesh, [Partial(kind)], run_check=False)
        with pytest.raises(LayoutError, match="cannot be reduced") as caught:
            redistribute(x, [R])
        found.append(caught.value.fix)
        wide = DTensor.from_local(x.to_local().to(eval(found[-1][5:-7])), mesh, x.placements, run_check=False)
        redistribute(wide, [R])
        theirs = []
        for context in (nullcontext, for_dtensor):
            with context():
                try:
                    theirs.append(x.redistribute(placements=[R]).to_local().tolist())
                except (NotImplementedError, RuntimeError) as error:
                    theirs.append(str(error).splitlines()[0])
        assert theirs[0] == theirs[1]
    return found


def test_types_without_a_reduction_are_refused_or_left_to_pytorch(gang):
    fixes = gang(4).run(without_a_reduction)[0]
    assert fixes == [*["x.to(torch.int64) first"] * 3, "x.to(torch.complex64) first"]


def after_a_history(rank, world_size):
    """PyTorch 2.13's planner has other plans on a rank that planned something else before; ours has not."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(4096.0).view(64, 64)
    x = distribute_tensor(whole, mesh, [S0, S1])
    with for_dtensor(), _redistribute.use_min_cost_redistribution_plan():
        if rank == 0:
            meta = private.spec_of(x).tensor_meta
            strided = (_StridedShard(0, split_factor=2), R)
            past = DTensorSpec(mesh, strided, meta, use_strided_shard_as_shard_order=False)
            _redistribute._gen_transform_infos_non_cached(DTensorSpec(mesh, (R, R), meta), past, True)
        y = x.redistribute(placements=[S1, S0])
    return y.to_local(), part(whole, Layout.parse("S1 S0", (2, 2), (64, 64)), rank)


def test_a_ranks_history_changes_nothing(gang):
    for found, expected in gang(4).run(after_a_history):
        assert torch.equal(found, expected)
