"""Losses of sharded inputs: values and gradients equal those on one device, without a gather."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.torch_version import TorchVersion

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from tests.reshard.placing import numbers, place

F = torch.nn.functional
HAS_RULES = TorchVersion(torch.__version__) >= "2.13"
"""True from 2.13 on; earlier, DTensor has no rules for some losses, and they are gathered."""
CONTEXTS = {"replicate_fallback": lambda: replicate_fallback(warn="error" if HAS_RULES else False)}
if HAS_RULES:
    CONTEXTS["for_dtensor"] = for_dtensor
LAYOUTS = {
    "even": (8, (4,), [Shard(0)]),
    "uneven": (7, (4,), [Shard(0)]),
    "nothing on some": (2, (4,), [Shard(0)]),
    "other dim": (6, (4,), [Shard(1)]),
    "strided": (8, (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "copies of pieces": (7, (2, 2), [Replicate(), Shard(0)]),
}
ELEMENTS = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.3),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.detach().sign()),
    "binary": F.binary_cross_entropy,
    "binary with logits": F.binary_cross_entropy_with_logits,
    "mse, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse, none": lambda x, y: F.mse_loss(x, y, reduction="none").square().sum(),
    "l1": F.l1_loss,
    "kl": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
}


def in_turns(places, cases, number):
    """Return so many of the places, each with the case whose turn it is."""
    return [(*place, case) for place, case, _ in zip(cycle(places), cycle(cases), range(number), strict=False)]


def laid(layout):
    """Return the number of rows, mesh and placements of a layout."""
    n, mesh_shape, placements = LAYOUTS[layout]
    return n, init_device_mesh("cpu", mesh_shape), placements


def of_elements(rank, world_size, cases):
    """Check, by context, layout and loss, the value and gradients."""
    found, meshes = {}, {layout: laid(layout) for _, layout, _ in cases}
    for context, layout, name in cases:
        (n, mesh, placements), loss = meshes[layout], ELEMENTS[name]
        plain = [numbers(n, 6, seed=seed).sigmoid().requires_grad_() for seed in (0, 1)]
        placed = [place(x.detach(), mesh, placements).requires_grad_() for x in plain]
        expected = loss(*plain)
        expected.backward()
        with CONTEXTS[context]():
            got = loss(*placed)
            got.backward()
        close = [torch.allclose(got.full_tensor(), expected)]
        close += [torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-7)
                  for a, b in zip(placed, plain, strict=True) if b.grad is not None]  # fmt: skip
        found[context, layout, name] = close
    return found


@pytest.mark.slow
def test_losses_of_elements(gang):
    """Every loss of rows that are not as many on all ranks, and in one other place; every place."""
    others = [place for place in product(CONTEXTS, LAYOUTS) if "uneven" not in place]
    cases = in_turns(product(CONTEXTS, ["uneven"]), ELEMENTS, len(ELEMENTS)) + in_turns(others, ELEMENTS, 10)
    for found in gang(4).run(of_elements, cases, timeout_s=120.0):
        assert list(found) == cases
        assert {key: close for key, close in found.items() if not all(close)} == {}


CLASSES = {
    "plain": {},
    "ignored": {"ignore_index": 3},
    "all ignored on a rank": {"ignore_index": 0},
    "weights": {"weight": numbers(6, seed=5).abs() + 0.1},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, ignored": {"label_smoothing": 0.1, "ignore_index": 3},
    "sum": {"reduction": "sum", "ignore_index": 3},
}
SHAPES = {"rows": (), "images": (3, 2)}
QUICK = list(product(list(CONTEXTS)[-1:], ("uneven", "nothing on some"), SHAPES))


def of_classes(rank, world_size, cases):
    """Check, by context, layout, shape and options, the value and gradient."""
    found, meshes = {}, {layout: laid(layout) for _, layout, _, _ in cases}
    for context, layout, shape, name in cases:
        (n, mesh, placements), more, options = meshes[layout], SHAPES[shape], CLASSES[name]
        copies = [Replicate()] * mesh.ndim
        of_target = copies if layout == "other dim" else placements
        x = numbers(n, 6, *more).requires_grad_()
        target = torch.randint(6, (n, *more), generator=torch.Generator().manual_seed(2))
        target[: max(1, n // 4)] = 0
        d = place(x.detach(), mesh, placements).requires_grad_()
        placed = {k: place(v, mesh, copies) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        expected = F.cross_entropy(x, target, **options)
        expected.backward()
        with CONTEXTS[context]():
            got = F.cross_entropy(d, place(target, mesh, of_target), **placed)
            got.backward()
        close = (torch.allclose(got.full_tensor(), expected, equal_nan=True),
                 torch.allclose(d.grad.full_tensor(), x.grad, atol=1e-6, equal_nan=True))  # fmt: skip
        found[context, layout, shape, name] = close
    return found


@pytest.mark.parametrize(
    "cases",
    [
        in_turns(QUICK, CLASSES, 2 * len(CLASSES)),
        pytest.param(in_turns(product(CONTEXTS, LAYOUTS, SHAPES), CLASSES, 24), marks=pytest.mark.slow),
    ],
    ids=["quick", "every place"],
)
def test_losses_of_classes(gang, cases):
    for found in gang(4).run(of_classes, cases, timeout_s=120.0):
        assert list(found) == cases
        assert {key: close for key, close in found.items() if not all(close)} == {}


def cost(rank, world_size):
    """Check the collectives of a mean, a sum that overflows float16, and `loss_parallel`."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    x, y = numbers(7, 6), numbers(7, 6, seed=1)
    a, b = (place(t, mesh, [Shard(0)]).requires_grad_() for t in (x, y))
    with CommDebugMode() as messages, for_dtensor():
        loss = F.mse_loss(a, b)
        loss.backward()
        found["messages"] = messages.get_total_counts()
        found["is a part"] = loss.placements[0].is_partial()
    large = torch.full((8, 512), 200.0, dtype=torch.float16)
    with for_dtensor():
        loss = F.mse_loss(place(large, mesh, [Shard(0)]), place(torch.zeros_like(large), mesh, [Shard(0)]))
    found["float16"] = loss.full_tensor().item(), loss.dtype
    logits, target = numbers(6, 8).requires_grad_(), torch.arange(6)
    cut = place(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    F.cross_entropy(logits, target, ignore_index=2).backward()
    with for_dtensor(), loss_parallel(), CommDebugMode() as messages:
        F.cross_entropy(cut, place(target, mesh, [Replicate()]), ignore_index=2).backward()
    kinds = {str(kind) for kind in messages.get_comm_counts()}
    found["classes cut"] = (
        torch.allclose(cut.grad.full_tensor(), logits.grad, atol=1e-6),
        any("gather" in k for k in kinds),
    )
    return found


@pytest.mark.slow
def test_what_an_average_costs(gang):
    for found in gang(4).run(cost, timeout_s=120.0):
        assert found == {
            "messages": 0, "is a part": True, "float16": (40000.0, torch.float16), "classes cut": (True, False),
        }  # fmt: skip


def bare(rank, world_size):
    """Check the gradient of a mean loss by DTensor alone."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, y = numbers(8, 6).requires_grad_(), numbers(8, 6, seed=1)
    d = DTensor.from_local(x.detach().chunk(world_size)[rank], mesh, [Shard(0)]).requires_grad_()
    F.mse_loss(x, y).backward()
    F.mse_loss(d, place(y, mesh, [Shard(0)])).backward()
    return torch.allclose(d.grad.full_tensor(), x.grad)


def test_dtensor_alone_is_wrong(gang):
    """Justify the layer: if this fails, PyTorch has fixed the loss."""
    assert gang(4).run(bare, timeout_s=120.0) == [False] * 4
