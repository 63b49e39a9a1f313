"""A diffusion transformer laid on a mesh computes the loss and the gradients of the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.mesh.axes import Axes
from meshwright.mesh.groups import build_mesh
from meshwright.mesh.shards import local_box, to_local
from meshwright.models.build import build_model
from meshwright.models.dit import DiT
from meshwright.models.shapes import Part
from meshwright.nn.linear import defer_weight_gradients, run_products
from meshwright.parallel.apply import ParallelOptions, apply_parallel
from meshwright.parallel.data import reduce_gradients, set_gradient_sync
from meshwright.parallel.tensor import sync_partial_gradients
from tests.models.dits import PICTURES, VIDEOS, fill, make_batch

BATCH = 4
SHORT = [replace(spec, num_layers=1) for spec in (PICTURES, VIDEOS)]
LAYOUTS = [Axes(tp=2), Axes(dp_shard=2), Axes(dp_shard=2, tp=2), Axes(dp_replicate=2, dp_shard=2)]


def lay(spec, axes, *, part=None, dtype=torch.float64, **options):
    mesh = build_mesh(axes, torch.device("cpu"))
    model = build_model(spec, dtype=dtype, part=part)
    apply_parallel(model, mesh, axes, ParallelOptions(sequence_parallel=False, **options))
    model.to_empty(device="cpu")
    return fill(model)


def loss_and_gradients(rank, world_size, spec, axes, splits):
    """The loss of this rank's samples, and its pieces of the gradients with their places."""
    model = lay(spec, axes, recompute=splits)
    own = slice(
        *(axes.data_index(rank) * BATCH // axes.data_parallel() + n for n in (0, BATCH // axes.data_parallel()))
    )
    store = defer_weight_gradients(model)
    store.defers = splits
    set_gradient_sync(model, not splits)
    loss = model(*(x[own] for x in make_batch(spec, BATCH))).square().sum() / BATCH
    loss.backward()
    if splits:
        run_products(store.take())
        reduce_gradients(model)
    sync_partial_gradients(model)
    pieces = {}
    for name, parameter in model.named_parameters():
        assert type(parameter.grad) is type(parameter) and parameter.grad.placements == parameter.placements, name
        pieces[name] = local_box(parameter).slices(), to_local(parameter.grad).clone()
    return loss.item(), pieces


@pytest.mark.parametrize(
    ("axes", "spec", "splits"),
    [
        pytest.param(axes, spec, splits, id=f"{axes}, {name}", marks=() if axes in quick else pytest.mark.slow)
        for name, spec, splits, quick in (
            ("pictures", SHORT[0], False, (Axes(tp=2),)), ("videos, put off", SHORT[1], True, (Axes(dp_shard=2, tp=2),))
        )
        for axes in LAYOUTS
    ],
)  # fmt: skip
def test_every_gradient_is_that_of_the_plain_model(gang, spec, axes, splits):
    plain = fill(DiT(spec).double())
    expected = plain(*make_batch(spec, BATCH)).square().sum() / BATCH
    expected.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    found = gang(axes.num_ranks()).run(loss_and_gradients, spec, axes, splits)
    copies = axes.num_ranks() // axes.data_parallel()
    assert sum(loss for loss, _ in found) / copies == pytest.approx(expected.item(), rel=1e-12)
    for _, pieces in found:
        assert pieces.keys() == wanted.keys()
        for name, (index, piece) in pieces.items():
            whole = wanted[name]
            assert (piece - whole[index]).abs().max() <= 1e-12 * whole.abs().max(), name


def structure(rank, world_size, axes, part):
    model = lay(PICTURES, axes, part=part)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return {name: p.placements if isinstance(p, DTensor) else None for name, p in model.named_parameters()}, units


def test_what_tensor_parallel_divides(gang):
    placements, units = gang(2).run(structure, Axes(tp=2), None)[0]
    assert units == [] and len(placements) == len(list(DiT(PICTURES).parameters()))
    columns, rows = ("wq", "wk", "wv", "fc1"), ("wo", "fc2")
    for name, (found,) in placements.items():
        layer, kind = name.split(".")[-2:]
        if not name.startswith("blocks") or layer == "modulation" or (layer in rows and kind == "bias"):
            assert found.is_replicate(), name
        else:
            assert found.is_shard(0 if layer in columns else 1), name


@pytest.mark.parametrize("part", [Part(range(4)), Part(range(2), 0, 3), Part(range(2, 2), 1, 3), Part(range(0), 0, 3)])
def test_blocks_are_the_units(gang, part):
    placements, units = gang(2).run(structure, Axes(dp_shard=2), part)[0]
    assert all(found[0].is_shard(0) for found in placements.values())
    assert units == ["", *(f"blocks.{layer}" for layer in part.layers)]


def mixed_precision(rank, world_size):
    model = lay(VIDEOS, Axes(dp_shard=2), dtype=torch.float32, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = model(*make_batch(VIDEOS, 2, dtype=torch.bfloat16))
    found.float().square().sum().backward()
    return found.dtype, {p.grad.dtype for p in model.parameters()}, found.float().detach()


def test_mixed_precision(gang):
    expected = fill(DiT(VIDEOS).double())(*make_batch(VIDEOS, 2))
    for dtype, gradient_dtypes, found in gang(2).run(mixed_precision):
        assert dtype == torch.bfloat16 and gradient_dtypes == {torch.float32}
        assert (found - expected).abs().max() <= 0.1 * expected.abs().max()


def empty_part(rank, world_size, axes, part):
    """What a part without layers gives for a stream, or for samples, and what gradient it hands back."""
    model = lay(PICTURES, axes, part=part)
    x, *told = make_batch(PICTURES, 2)
    inputs = x if part.is_first else torch.randn(2, PICTURES.num_tokens(), PICTURES.dim).double().requires_grad_()
    out = model(inputs, *told)
    out.sum().backward()
    return out.shape == inputs.shape or part.is_first, inputs.grad is None or bool((inputs.grad == 1).all())


@pytest.mark.parametrize("axes", [Axes(tp=2), Axes(dp_shard=2)], ids=str)
@pytest.mark.parametrize("part", [Part(range(0), 0, 3), Part(range(2, 2), 1, 3)], ids=["first", "middle"])
def test_a_part_without_layers(gang, axes, part):
    assert gang(2).run(empty_part, axes, part) == [(True, True)] * 2


def with_sequence_parallel(rank, world_size):
    axes = Axes(tp=2)
    model = build_model(PICTURES, dtype=torch.float32)
    with pytest.raises(AssertionError, match="patches attend"):
        apply_parallel(model, build_mesh(axes, torch.device("cpu")), axes, ParallelOptions(sequence_parallel=True))


def test_patches_are_not_divided_as_a_sequence(gang):
    gang(2).run(with_sequence_parallel)
