"""Views of DTensors within the contexts: writes reach the base tensor, and views see writes to it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.dtensor_ops.run_replicated import OperatorError
from meshwright.reshard.dtensor.redistribute import redistribute
from tests.reshard.placing import numbers, place

CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": lambda: replicate_fallback(warn=False)}
LAYOUTS = {
    "rows": ((4,), [Shard(0)], None),
    "columns, unevenly": ((4,), [Shard(1)], None),
    "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], None),
    "both dims": ((2, 2), [Shard(1), Shard(0)], None),
    "in another order": ((2, 2), [Shard(0), Shard(0)], {0: (1, 0)}),
    "copies": ((4,), [Replicate()], None),
}


def mesh_of(name):
    """Return the mesh of a layout, once per body: DTensor's caches of a mesh outlive the body and its groups."""
    return init_device_mesh("cpu", LAYOUTS[name][0])


def laid(x, name, mesh):
    _, placements, order = LAYOUTS[name]
    return place(x, mesh, placements) if order is None else redistribute(
        place(x, mesh, [Replicate()] * mesh.ndim), placements, shard_order=order
    )  # fmt: skip


PLACES = [("replicate_fallback", layout) for layout in LAYOUTS]
PLACES += [("for_dtensor", layout) for layout in ("rows", "in another order")]

VIEWS = {
    "rows": lambda x: x[1:3],
    "every other row": lambda x: x[::2],
    "select": lambda x: x[1],
    "columns": lambda x: x[:, 1:4],
    "narrow": lambda x: x.narrow(0, 5, 2),
    "chunk": lambda x: x.chunk(3)[1],
    "split": lambda x: x.split([2, 3, 3])[2],
    "unbind": lambda x: x.unbind(0)[6],
    "diagonal": lambda x: x.diagonal(),
    "windows of rows": lambda x: x.unfold(0, 2, 2),
    "transposed": lambda x: x.t(),
    "rows of columns": lambda x: x.t()[2:4],
    "row of a row": lambda x: x[2:7][1],
    "columns of rows": lambda x: x[2:7].t()[:, 1],
    "flat": lambda x: x.view(-1)[7:20],
    "as complex": lambda x: torch.view_as_complex(x.view(8, 3, 2))[3],
    "detached": lambda x: x.detach()[4:6],
}
QUICK_VIEWS = {"every other row", "select", "columns", "windows of rows", "row of a row", "columns of rows", "flat",
               "as complex", "detached"}  # fmt: skip
"""Views that between them cover the shardings and transformations of the others."""
ONLY_GATHERED = {"for_dtensor": {"as complex", "diagonal", "flat", "unbind"}, "replicate_fallback": set()}
"""Views without a DTensor rule, or without one for sharded dims."""


def by_view(rank, world_size, name, layout, views):
    """Check, by view, that writes to it and to the base are visible in both, in another view, and in an alias."""
    found, mesh = {}, mesh_of(layout)
    with CONTEXTS[name]():
        for key in views:
            view, plain = VIEWS[key], numbers(8, 6)
            x = laid(plain, layout, mesh)
            alias, other = x.detach(), x[1:]
            v, w = view(x), view(plain)

            def agree():
                pairs = ((v, w), (x, plain), (alias, plain), (other, plain[1:]))  # noqa: B023
                return [torch.equal(a.full_tensor(), b) for a, b in pairs]

            seen = []
            for write_v, write_x in (
                (lambda t: t.mul_(2), lambda t: t.add_(1)),
                (lambda t: t.copy_(t.detach() * 3), lambda t: t.mul_(3)),
            ):
                write_v(v), write_v(w)
                seen += agree()
                write_x(x), write_x(plain)
                seen += agree()
            found[key] = seen
    return found


def views_in_turn():
    """The views that are not quick where the quick ones are; elsewhere a third of them all, whose turn it is."""
    yield pytest.param("replicate_fallback", "both dims", QUICK_VIEWS, id="some, of both dims")
    for turn, (name, layout) in enumerate(PLACES):
        views = VIEWS.keys() - QUICK_VIEWS if layout == "both dims" else {*list(VIEWS)[turn % 3 :: 3]}
        yield pytest.param(name, layout, views, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "views"), list(views_in_turn()))
def test_all_names_of_a_memory_see_a_write(gang, name, layout, views):
    views = sorted(views - ONLY_GATHERED[name])
    for found in gang(4).run(by_view, name, layout, views, timeout_s=120.0):
        assert found == dict.fromkeys(views, [True] * 16)


def gradients(rank, world_size, layout):
    """Compare gradients through writes to views with those of plain tensors."""
    found, mesh = {}, mesh_of(layout)
    writes = {
        "rows": lambda y: y.__setitem__(slice(1, 3), 7.0),
        "scaled columns": lambda y: y[:, 1:3].mul_(y[:, 3:5].clone()),
        "a row from another": lambda y: y[1].copy_(y[5].clone()),
        "diagonal": lambda y: y.diagonal().add_(y[0].clone()),
        "row of a row": lambda y: y[2:6][1].mul_(y[7].clone()),
    }
    with replicate_fallback(warn=False):
        for key, write in writes.items():
            plain = numbers(8, 6).requires_grad_()
            x = laid(plain.detach(), layout, mesh).requires_grad_()
            for one in (plain, x):
                y = one * one
                write(y)
                (y * y).sum().backward()
            found[key] = torch.allclose(x.grad.full_tensor(), plain.grad, atol=1e-5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["both dims", "strided", "in another order"])
def test_gradients_flow_through_writes_to_views(gang, layout):
    for found in gang(4).run(gradients, layout, timeout_s=120.0):
        assert set(found.values()) == {True}, found


def lists_and_outs(rank, world_size):
    """Check foreach and `out=` writes, a failing operator, no-grad and inference modes, and nested contexts."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}

    def both(key, write, context):
        plain = numbers(8, 6)
        x = place(plain, mesh, [Shard(0)])
        with context():
            for one in (x, plain):
                write(one)
        found[key] = torch.equal(x.full_tensor(), plain)

    for name, context in CONTEXTS.items():
        both((name, "lists"), lambda x: torch._foreach_mul_([x[1:3], x[6]], [x[3:5], x[0]]), context)
        both((name, "out"), lambda x: torch.add(x[3:5], x[4:6], out=x[1:3]), context)
        both((name, "itself and a part"), lambda x: torch._foreach_add_([x, x[1:3]], 1.0), context)
        both((name, "one row over the next"), lambda x: x[1:].copy_(x[:-1].clone()), context)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                both((name, mode.__name__), lambda x: x[2:5].t()[1].add_(1), context)

    def across_contexts(x):
        with replicate_fallback(warn=False):
            v = x[1:3]
        v.zero_()

    both("nested", across_contexts, for_dtensor)
    x = place(numbers(8, 6), mesh, [Shard(0)])
    with replicate_fallback(warn=False):
        with pytest.raises(RuntimeError, match="size|shape"):
            x[1:3].copy_(place(numbers(5, 5), mesh, [Replicate()]))
        with pytest.raises(OperatorError, match="random numbers"):
            x[1:3].uniform_()
        part = place(numbers(8, 6), init_device_mesh("cpu", (2, 2)), [Partial(), Shard(0)])
        row, plain = part[2], numbers(8, 6)
        part[1:3].mul_(2)
        plain[1:3].mul_(2)
        found["parts of a sum"] = torch.allclose(part.full_tensor(), plain)
        found["a view of them"] = torch.allclose(row.full_tensor(), plain[2])
    found["left as it was"] = torch.equal(x.full_tensor(), numbers(8, 6))
    return found


def test_lists_outs_failures_and_other_modes(gang):
    for found in gang(4).run(lists_and_outs, timeout_s=120.0):
        assert set(found.values()) == {True}, found


def what_it_costs(rank, world_size):
    """Count the collectives of writes to a tensor, and check that autograd graphs are not kept alive."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, found = place(numbers(8, 6), mesh, [Shard(0)]), {}
    with CommDebugMode() as messages, replicate_fallback(warn=False) as fallbacks:

        def collectives(write):
            before = messages.get_total_counts()
            write()
            return messages.get_total_counts() - before

        found["never viewed"] = collectives(lambda: x.add_(1))
        found["viewed on the ranks"] = collectives(lambda: x.detach().add_(1))
        v = x[1:3]
        found["view lives"] = collectives(lambda: x.add_(1))
        del v
        kept = x[3:4]
        kept = kept if rank == 0 else None  # alive on one rank alone
        found["view lives somewhere"] = collectives(lambda: x.add_(1))
        found["up to date"] = kept is None or torch.allclose(kept.to_local(), numbers(8, 6)[3:4] + 4)
        del kept
        found["view is gone"] = collectives(lambda: x.add_(1))
        found["and was found so"] = collectives(lambda: x.add_(1))
        x[1:3] = 7.0
        found["counts"] = dict(fallbacks.counts)
    with replicate_fallback(warn="error"), pytest.raises(OperatorError, match="each call would gather"):
        x[1:3].zero_()
    with for_dtensor():
        loss = (place(numbers(8, 6), mesh, [Shard(0)]).requires_grad_() * 2).sum()
        seen, total = torch.utils.weak.WeakTensorKeyDictionary(), loss.detach()
        seen[loss] = True
        del loss
        gc.collect()
        found["graphs are let go"] = len(seen) == 0 and total.dim() == 0
    return found


def test_what_it_costs(gang):
    for found in gang(4).run(what_it_costs, timeout_s=120.0):
        assert found == {
            "never viewed": 0, "viewed on the ranks": 0, "view lives": 2, "view lives somewhere": 2, "up to date": True,
            "view is gone": 1, "and was found so": 0, "counts": {"aten.fill_.Tensor": 1}, "graphs are let go": True,
        }  # fmt: skip


TURNS = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "squeeze_ one": lambda x: x.unsqueeze_(2).squeeze_(-1),
    "a view": lambda x: x[1:3].t_(),
    "twice": lambda x: x[:, 2:5].t_().unsqueeze_(0),
}


def turned(rank, world_size, name, layout):
    """Check, by in-place view operator, the shape, values, gradient, and that writes still reach the base."""
    found, mesh = {}, mesh_of(layout)
    with CONTEXTS[name]():
        for key, turn in TURNS.items():
            of_view = key in ("a view", "twice")  # there PyTorch's gradients are not turned
            plain = numbers(8, 6).requires_grad_(not of_view)
            x = laid(plain.detach(), layout, mesh).requires_grad_(not of_view)
            seen = []
            for one in (plain, x):
                y = one * 2
                z = turn(y)
                z.mul_(3)
                if not of_view:
                    (z * z).sum().backward()
                of_one = (z, y) if of_view else (z, y, one.grad)
                seen.append([tuple(z.shape), *(t.full_tensor() if one is x else t for t in of_one)])
            (shape, *expected), (same, *got) = seen
            close = [torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, got, strict=True)]
            found[key] = shape == same and all(close)
        with pytest.raises(OperatorError, match="transforms a view in place"):
            (laid(numbers(8, 6), layout, mesh).requires_grad_() * 2)[1:7].t_()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("replicate_fallback", "both dims"), ("for_dtensor", "in another order")])
def test_a_tensor_is_turned_in_place(gang, name, layout):
    for found in gang(4).run(turned, name, layout, timeout_s=120.0):
        assert found == dict.fromkeys(TURNS, True)
