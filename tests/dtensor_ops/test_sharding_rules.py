"""Sharding rules: correct values on all layouts, and no communication for work along unsharded dims."""

from __future__ import annotations

import itertools
import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.torch_version import TorchVersion

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.sharding_rules import constant_pad_rule, mean_rule, select_rule, slice_rule
from meshwright.reshard.dtensor.placements import layout_of_placements
from tests.helpers import covering_pairs
from tests.reshard.placing import numbers, place

F = torch.nn.functional


def indices(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(7))


def distinct(size, *shape):
    """Return indices along dim 1 that are distinct within a row, so that scatter is deterministic."""
    rows = [torch.randperm(size, generator=torch.Generator().manual_seed(row))[: shape[1]] for row in range(shape[0])]
    return torch.stack(rows)


OPERATORS = {
    "sort": (lambda x: torch.sort(x, dim=1), lambda n: [numbers(n, 6)]),
    "argsort": (lambda x: torch.argsort(x, dim=-1, stable=True), lambda n: [numbers(n, 6)]),
    "gather": (lambda x, i: torch.gather(x, 1, i), lambda n: [numbers(n, 6), indices(6, n, 4)]),
    "scatter": (lambda x, i, s: torch.scatter(x, 1, i, s), lambda n: [numbers(n, 6), distinct(6, n, 4), numbers(n, 4)]),
    "scatter value": (lambda x, i: torch.scatter(x, 1, i, 2.0), lambda n: [numbers(n, 6), indices(6, n, 4)]),
    "scatter multiply": (
        lambda x, i, s: torch.ops.aten.scatter.reduce(x, 1, i, s, reduce="multiply"),
        lambda n: [numbers(n, 6), distinct(6, n, 4), numbers(n, 4)],
    ),
    "scatter_add": (lambda x, i, s: torch.scatter_add(x, -1, i, s),
                    lambda n: [numbers(n, 6), indices(6, n, 9), numbers(n, 9, seed=1)]),
    "scatter_add_": (lambda x, i, s: x.clone().scatter_add_(1, i, s),
                     lambda n: [numbers(n, 6), indices(6, n, 9), numbers(n, 9, seed=1)]),
    **{
        f"scatter_reduce {kind}": (
            lambda x, i, s, kind=kind: torch.scatter_reduce(x, 1, i, s, kind, include_self=kind != "amax"),
            lambda n: [numbers(n, 6), indices(6, n, 9), numbers(n, 9, seed=1)],
        )
        for kind in ("sum", "prod", "mean", "amin", "amax")
    },
    "index_add": (lambda x, i, s: x.index_add(1, i, s, alpha=2),
                  lambda n: [numbers(n, 6), torch.tensor([4, 1, 4]), numbers(n, 3, seed=1)]),
    "index_add_": (lambda x, i, s: x.clone().index_add_(-1, i, s),
                   lambda n: [numbers(n, 6), torch.tensor([4, 1, 4]), numbers(n, 3, seed=1)]),
    "index_copy": (lambda x, i, s: x.index_copy(1, i, s),
                   lambda n: [numbers(n, 6), torch.tensor([4, 1, 0]), numbers(n, 3, seed=1)]),
    "index_put": (lambda x, i, s: torch.ops.aten.index_put(x, (None, i), s),
                  lambda n: [numbers(n, 6), torch.tensor([4, 1]), numbers(n, 2)]),
    "softmax": (lambda x: torch.softmax(x, 1), lambda n: [numbers(n, 6)]),
    "softmax backward": (lambda g, y: torch.ops.aten._softmax_backward_data(g, y, 1, torch.float32),
                         lambda n: [numbers(n, 6), numbers(n, 6, seed=1).softmax(1)]),
    "slice": (lambda x: x[:, 1:5:2], lambda n: [numbers(n, 6)]),
    "einsum": (lambda x, w: torch.einsum("nik,k->ni", x, w), lambda n: [numbers(n, 3, 5), numbers(5)]),
    "pad": (lambda x: F.pad(x, (1, 2)), lambda n: [numbers(n, 6)]),
    "pad reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), lambda n: [numbers(n, 6)]),
    "pad replicate": (lambda x: F.pad(x, (1, 2, 0, 3), mode="replicate"), lambda n: [numbers(n, 5, 6)]),
    "unfold": (lambda x: x.unfold(1, 3, 2), lambda n: [numbers(n, 6)]),
    "im2col": (lambda x: F.unfold(x, (2, 3), padding=1), lambda n: [numbers(n, 2, 5, 6)]),
    "col2im": (lambda x: F.fold(x, (4, 5), (2, 2)), lambda n: [numbers(n, 8, 12)]),
}  # fmt: skip
"""Operators that work along dims after the first, whose size is `n` and which is sharded."""

LAYOUTS = {
    "even": (8, (4,), [Shard(0)]),
    "uneven": (7, (4,), [Shard(0)]),
    "strided": (8, (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "uneven on two axes": (9, (2, 2), [Shard(0), Shard(0)]),
    "one axis of two": (6, (2, 2), [Replicate(), Shard(0)]),
}


def in_turn(layouts, operators, num_layouts):
    """Return pairs of a layout and an operator, with `num_layouts` per operator, all layouts equally often."""
    layouts = list(layouts)
    return [
        (layouts[(at + more) % len(layouts)], name)
        for at, name in enumerate(operators) for more in range(num_layouts)
    ]  # fmt: skip


def meshes_of(layouts):
    """Return a mesh for each distinct mesh shape."""
    return {shape: init_device_mesh("cpu", shape) for shape in dict.fromkeys(layout[-2] for layout in layouts.values())}


def along_other_dims(rank, world_size, pairs):
    """Record, by layout and operator, correctness, collectives and fallbacks."""
    found, meshes = {}, meshes_of(LAYOUTS)
    for layout, name in pairs:
        (n, mesh_shape, placements), (operator, inputs) = LAYOUTS[layout], OPERATORS[name]
        mesh = meshes[mesh_shape]
        copies = [Replicate()] * mesh.ndim
        plain = inputs(n)
        placed = [place(x, mesh, placements if x.shape[0] == n else copies) for x in plain]
        with CommDebugMode() as messages, replicate_fallback(warn=False) as fallbacks:
            got = operator(*placed)
        expected = operator(*plain)
        results = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, expected)), strict=True)
        is_right = all(torch.allclose(a.full_tensor(), b, atol=1e-6) for a, b in results)
        found[layout, name] = is_right, messages.get_total_counts(), dict(fallbacks.counts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_layouts", [1, 2])
def test_work_along_dims_that_are_not_cut_is_right_and_sends_nothing(gang, num_layouts):
    pairs = in_turn(LAYOUTS, OPERATORS, num_layouts)
    for found in gang(4).run(along_other_dims, pairs, timeout_s=120.0):
        assert len(found) == num_layouts * len(OPERATORS)
        without_rule = {"index_put"} if TorchVersion(torch.__version__) < "2.13" else set()
        assert {key[1] for key, outcome in found.items() if outcome != (True, 0, {})} == without_rule
        assert all(outcome[0] for outcome in found.values())


ALONG_THE_CUT_DIM = {
    "sort": (lambda x: torch.sort(x, dim=0), lambda: [numbers(8, 6)]),
    "gather": (lambda x, i: torch.gather(x, 0, i), lambda: [numbers(8, 6), indices(8, 4, 6)]),
    "gather fewer rows": (lambda x, i: torch.gather(x, 1, i), lambda: [numbers(8, 6), indices(6, 4, 3)]),
    "gather one row": (lambda x, i: torch.gather(x, 0, i), lambda: [numbers(8, 6), indices(8, 1, 6)]),
    "scatter": (lambda x, i: torch.scatter(x, 0, i, 2.0), lambda: [numbers(8, 6), indices(8, 4, 6)]),
    "scatter_add": (lambda x, i, s: torch.scatter_add(x, 0, i, s),
                    lambda: [numbers(8, 6), indices(8, 9, 6), numbers(9, 6, seed=1)]),
    "scatter_add more rows": (lambda x, i, s: torch.scatter_add(x, 1, i, s),
                              lambda: [numbers(8, 6), indices(6, 8, 9), numbers(10, 9, seed=1)]),
    "scatter_add fewer rows": (lambda x, i, s: torch.scatter_add(x, 0, i, s),
                               lambda: [numbers(8, 6), indices(8, 4, 6), numbers(9, 6, seed=1)]),
    "scatter_reduce": (lambda x, i, s: torch.scatter_reduce(x, 0, i, s, "amax"),
                       lambda: [numbers(8, 6), indices(8, 9, 6), numbers(9, 6, seed=1)]),
    "pad": (lambda x: F.pad(x.T, (2, 1), mode="reflect"), lambda: [numbers(8, 8)]),
    "pad otherwise": (lambda x: F.pad(x.T, (0, 2), mode="reflect"), lambda: [numbers(8, 8)]),
    "unfold": (lambda x: x.unfold(0, 3, 2), lambda: [numbers(8, 6)]),
    "masked_scatter": (lambda x, m, s: torch.masked_scatter(x, m > 0, s),
                       lambda: [numbers(8, 6), numbers(8, 6, seed=2), numbers(8, 6, seed=1)]),
}  # fmt: skip
CUT = {"chunks": ((4,), [Shard(0)]), "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
       "other dim": ((4,), [Shard(1)]), "partial": ((2, 2), [Partial(), Shard(0)])}  # fmt: skip


def along_the_cut_dim(rank, world_size, pairs):
    """Record, by layout and operator, correctness and fallbacks."""
    found, meshes = {}, meshes_of(CUT)
    for layout, name in pairs:
        (mesh_shape, placements), (operator, inputs) = CUT[layout], ALONG_THE_CUT_DIM[name]
        mesh = meshes[mesh_shape]
        whole = [Replicate() if p.is_partial() else p for p in placements]
        plain = inputs()
        placed = [place(x, mesh, placements if x.is_floating_point() else whole) for x in plain]
        with replicate_fallback(warn=False) as fallbacks:
            got = operator(*placed)
        results = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, operator(*plain))), strict=True)
        is_right = all(torch.allclose(a.full_tensor(), b, atol=1e-6) for a, b in results)
        found[layout, name] = is_right, dict(fallbacks.counts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_layouts", [1, 2])
def test_work_along_the_dim_that_is_cut_is_right_without_the_fallback(gang, num_layouts):
    pairs = in_turn(CUT, ALONG_THE_CUT_DIM, num_layouts)
    for found in gang(4).run(along_the_cut_dim, pairs, timeout_s=120.0):
        assert len(found) == num_layouts * len(ALONG_THE_CUT_DIM)
        assert {key: outcome for key, outcome in found.items() if outcome != (True, {})} == {}


SLICES = {
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "index_add_": lambda x, i, s: x.clone().index_add_(0, i, s),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    "index_copy_": lambda x, i, s: x.clone().index_copy_(0, i, s),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i.view(-1, 1).expand(4, 6), s),
    "scatter_add_": lambda x, i, s: x.clone().scatter_add_(0, i.view(-1, 1).expand(4, 6), s),
    "scatter_reduce": lambda x, i, s: x.scatter_reduce(0, i.view(-1, 1).expand(4, 6), s, "sum"),
}


def slices(rank, world_size, dtype):
    """Check, by operator and placements of tensor, index and source, slices along the first dim."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    whole = Replicate()
    cases = covering_pairs(product(SLICES, (Shard(0), Shard(1), whole), (Shard(0), whole), (Shard(0), whole)))
    plain = [(3 * numbers(8, 6)).to(dtype), torch.tensor([5, 2, 7, 0]), (3 * numbers(4, 6, seed=1)).to(dtype)]
    for name, *cuts in cases:
        placed = [place(x, mesh, [p]) for x, p in zip(plain, cuts, strict=True)]
        with replicate_fallback(warn=False) as fallbacks:
            got = SLICES[name](*placed)
        close = torch.allclose(got.full_tensor(), SLICES[name](*plain))
        found[name, *map(str, cuts)] = close, dict(fallbacks.counts)
    return found


@pytest.mark.parametrize(
    "dtype", [torch.int64, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bool))]
)
def test_slices_go_where_the_whole_index_says(gang, dtype):
    for found in gang(4).run(slices, dtype, timeout_s=120.0):
        assert {key: outcome for key, outcome in found.items() if not outcome[0]} == {}
        gathered = {key for key, outcome in found.items() if outcome[1]}
        assert all(key[0].endswith("_") and key[1] == "S(0)" for key in gathered), "in place, along the dim that is cut"


def what_moves(rank, world_size):
    """Count the collectives of a `scatter_add` of sharded rows."""
    mesh = init_device_mesh("cpu", (world_size,))
    into, index, rows = numbers(5, 6), indices(5, 10, 6), numbers(10, 6, seed=1)
    placed = [place(into, mesh, [Replicate()]), place(index, mesh, [Shard(0)]), place(rows, mesh, [Shard(0)])]
    with CommDebugMode() as messages, replicate_fallback(warn="error"):
        total = torch.scatter_add(placed[0], 0, *placed[1:])
    is_right = torch.allclose(total.full_tensor(), torch.scatter_add(into, 0, index, rows), atol=1e-5)
    return is_right, messages.get_total_counts(), total.placements[0].is_partial()


def test_a_sum_of_rows_stays_partial(gang):
    assert gang(4).run(what_moves) == [(True, 0, True)] * 4


GRADIENTS = {
    "sort": lambda x, w: torch.sort(x, dim=1).values * w,
    "gather": lambda x, w: torch.gather(x * w, 1, w.argsort(1)),
    "scatter_reduce": lambda x, w: torch.scatter_reduce(x, 1, w.argsort(1), w, "sum"),
    "pad": lambda x, w: F.pad(x * w, (1, 2), mode="replicate").square(),
    "unfold": lambda x, w: (x * w).unfold(1, 3, 1).square(),
    "masked_scatter": lambda x, w: torch.masked_scatter(x, w > 0, w).square(),
    "einsum": lambda x, w: torch.einsum("ab,cb->ac", x, w).square(),
    "einsum over what is cut": lambda x, w: torch.einsum("ab,ac->bc", x, w).square(),
}


CUTS_OF_TWO = ((Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(0)))


def gradients(rank, world_size, num_cuts):
    """Compare, by operator and placements, gradients with those of plain tensors."""
    found, mesh = {}, init_device_mesh("cpu", (world_size,))
    for cuts, name in in_turn(CUTS_OF_TWO, GRADIENTS, num_cuts):
        operator = GRADIENTS[name]
        plain = [numbers(7, 6).requires_grad_(), numbers(7, 6, seed=1).requires_grad_()]
        placed = [place(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(plain, cuts, strict=True)]
        operator(*plain).sum().backward()
        with replicate_fallback(warn=False) as fallbacks:
            operator(*placed).sum().backward()
        pairs = list(zip(placed, plain, strict=True))
        close = all(torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-5) for a, b in pairs)
        found[name, *map(str, cuts)] = close, dict(fallbacks.counts)
    return found


@pytest.mark.parametrize("num_cuts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_are_those_of_plain_tensors(gang, num_cuts):
    for found in gang(4).run(gradients, num_cuts, timeout_s=120.0):
        assert {key: outcome for key, outcome in found.items() if not outcome[0]} == {}
        assert {key: outcome for key, outcome in found.items() if outcome[1]} == {}


AXES = (2, 3)


def pieces(whole, placements):
    """Yield the local shard of each rank of the mesh."""
    placements = tuple(Replicate() if p.is_partial() else p for p in placements)
    layout = layout_of_placements(placements, None, tuple(whole.shape), AXES)
    for rank in range(math.prod(AXES)):
        piece = whole
        for dim, slices in enumerate(layout.local_slices(rank)):
            piece = torch.cat([piece.narrow(dim, s.start, s.stop - s.start) for s in slices], dim)
        yield piece


def is_right(operator, x, before, after):
    """Check that the operator on the shards of `x` gives the shards of its result, with partial averages reduced."""
    found = torch.stack([operator(piece) for piece in pieces(x, before)])
    found = found.unflatten(0, AXES)
    for axis, placement in enumerate(after):
        if placement == Partial("avg"):
            found = found.mean(axis, keepdim=True).expand(*AXES, *found.shape[2:])
    expected = torch.stack(list(pieces(operator(x), after))).unflatten(0, AXES)
    return torch.allclose(found, expected, atol=1e-6)


def combinations(rule, x, now, *args, **options):
    """Yield the placements before and after that the rule allows on both axes."""
    spec = SimpleNamespace(
        shape=x.shape, ndim=x.ndim, placements=now, mesh=SimpleNamespace(size=lambda: math.prod(AXES))
    )
    for ways in itertools.product(rule(spec, *args, **options), repeat=len(AXES)):
        before, after = [way[1][0] for way in ways], [way[0][0] for way in ways]
        if not any(p.is_partial() for p in before):
            yield before, after


OLDER_LAYOUTS = [(Shard(0), Shard(1)), (_StridedShard(0, split_factor=3), Shard(0)), (Shard(1), Replicate())]
OLDER = [
    *((mean_rule, torch.mean, (), options) for options in ({"dim": 0}, {"dim": [-1]}, {"dim": 1, "keepdim": True})),
    (mean_rule, torch.mean, (), {}), (mean_rule, torch.mean, (), {"dim": [0, 1]}),
    *((constant_pad_rule, torch.constant_pad_nd, (padding, 2.0), {})
      for padding in ([1, 2], [0, 0, 3, 0], [1, 0, 0, 2])),
    *((slice_rule, torch.ops.aten.slice.Tensor, words, {}) for words in
      ((0, 3, 20, 1), (1, 2, 15, 3), (-1, 0, 18, 1), (0, None, None, 1), (0, 0, 36, 2))),
    *((select_rule, torch.select, (dim, 2), {}) for dim in (0, 1, -1)),
]  # fmt: skip
"""Rules for older releases, and calls of their operators."""


@pytest.mark.parametrize("now", OLDER_LAYOUTS, ids=str)
@pytest.mark.parametrize(("rule", "operator", "words", "options"), OLDER, ids=lambda x: getattr(x, "__name__", str(x)))
def test_all_that_an_older_rule_lists_is_right(now, rule, operator, words, options):
    x = numbers(36, 18)
    rights = [
        is_right(lambda piece: operator(piece, *words, **options), x, before, after)
        for before, after in combinations(rule, x, now, *words, **options)
    ]
    assert len(rights) > (4 if rule is mean_rule else 0) and all(rights)


def test_pieces_of_different_sizes_are_not_averaged():
    x = numbers(9, 12)
    now = (_StridedShard(0, split_factor=3), Shard(0))
    assert all(not p.is_partial() for _, after in combinations(mean_rule, x, now, 0) for p in after)


@pytest.mark.parametrize(("value", "count"), [(0, 1), (2.0, 0)])
def test_only_zeros_are_added_to_parts_of_a_sum(value, count):
    spec = SimpleNamespace(shape=(4, 4), ndim=2, placements=(Partial(), Partial("max")))
    ways = constant_pad_rule(spec, [1, 1], value)
    assert sum(way == ([Partial()], [Partial()]) for way in ways) == count
    assert all(way[0][0] != Partial("max") for way in ways)
