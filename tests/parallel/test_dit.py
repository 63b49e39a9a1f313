"""A parallelized diffusion transformer computes the same loss and gradients as the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.errors import LayoutError
from meshwright.mesh.axes import Axes
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.mesh.process_groups import build_mesh
from meshwright.models.contract.build_module import build_part
from meshwright.models.dit.module import DiT
from meshwright.nn.linear import compute_deferred, defer_weight_gradients
from meshwright.parallel.apply_plan import apply_plan
from meshwright.parallel.data_parallel import reduce_gradients, set_gradient_sync, sync_partial_gradients
from meshwright.parallel.rank_model import part_of
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.verify import verify
from tests.helpers import outcome
from tests.models.dit.dits import IMAGES, VIDEOS, fill, make_batch, words_of

BATCH = 4
SHORT = [replace(spec, num_layers=1) for spec in (IMAGES, VIDEOS)]
LAYOUTS = [Axes(tp=2), Axes(dp_shard=2), Axes(dp_shard=2, tp=2), Axes(dp_replicate=2, dp_shard=2)]


def lay(spec, axes, *more, layers=None, stage=0):
    config = load("dit-digits", [*words_of(spec, axes, layers), *more])
    plan, mesh = make_plan(config), build_mesh(axes, torch.device("cpu"))
    dtype = getattr(torch, plan.masters)
    model = build_part(config.family, run_facts(config), dtype=dtype, part=part_of(plan, stage))
    apply_plan(model, mesh, plan, plan.stages[stage], model_facts(config))
    model.to_empty(device="cpu")
    return fill(model)


def loss_and_gradients(rank, world_size, spec, axes, splits):
    """Return the loss of this rank's samples, and its gradient shards with their index ranges."""
    model = lay(spec, axes, f"recompute.policy={'full' if splits else 'none'}")
    own = slice(
        *(axes.data_index(rank) * BATCH // axes.data_parallel() + n for n in (0, BATCH // axes.data_parallel()))
    )
    store = defer_weight_gradients(model)
    store.defers = splits
    set_gradient_sync(model, not splits)
    loss = model(*(x[own] for x in make_batch(spec, BATCH))).square().sum() / BATCH
    loss.backward()
    if splits:
        compute_deferred(store.take())
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
            ("pictures", SHORT[0], False, (Axes(tp=2),)),
            ("videos, deferred", SHORT[1], True, (Axes(dp_shard=2),)),
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


def structure(rank, world_size, axes, layers, stage):
    model = lay(IMAGES, axes, layers=layers, stage=stage)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return {name: p.placements if isinstance(p, DTensor) else None for name, p in model.named_parameters()}, units


def test_what_tensor_parallel_divides(gang):
    placements, units = gang(2).run(structure, Axes(tp=2), None, 0)[0]
    assert units == [] and len(placements) == len(list(DiT(IMAGES).parameters()))
    columns, rows = ("wq", "wk", "wv", "fc1"), ("wo", "fc2")
    for name, (found,) in placements.items():
        layer, kind = name.split(".")[-2:]
        if not name.startswith("blocks") or layer == "modulation" or (layer in rows and kind == "bias"):
            assert found.is_replicate(), name
        else:
            assert found.is_shard(0 if layer in columns else 1), name


@pytest.mark.parametrize(
    ("layers", "stage", "blocks"),
    [(None, 0, range(4)), ((2, 0, 2), 0, range(2)), ((2, 0, 2), 1, range(0)), ((0, 2, 2), 0, range(0))],
)
def test_blocks_are_the_units(gang, layers, stage, blocks):
    placements, units = gang(2).run(structure, Axes(dp_shard=2), layers, stage)[0]
    assert all(found[0].is_shard(0) for found in placements.values())
    assert units == ["", *(f"blocks.{layer}" for layer in blocks)]


def mixed_precision(rank, world_size):
    model = lay(VIDEOS, Axes(dp_shard=2), "train.precision=bfloat16")
    found = model(*make_batch(VIDEOS, 2, dtype=torch.bfloat16))
    found.float().square().sum().backward()
    return found.dtype, {p.grad.dtype for p in model.parameters()}, found.float().detach()


def test_mixed_precision(gang):
    expected = fill(DiT(VIDEOS).double())(*make_batch(VIDEOS, 2))
    for dtype, gradient_dtypes, found in gang(2).run(mixed_precision):
        assert dtype == torch.bfloat16 and gradient_dtypes == {torch.float32}
        assert (found - expected).abs().max() <= 0.1 * expected.abs().max()


def empty_part(rank, world_size, axes, layers, stage):
    """Check the output shape and input gradient of a part without layers."""
    model = lay(IMAGES, axes, layers=layers, stage=stage)
    x, *told = make_batch(IMAGES, 2)
    inputs = x if stage == 0 else torch.randn(2, IMAGES.num_tokens(), IMAGES.dim).double().requires_grad_()
    out = model(inputs, *told)
    out.sum().backward()
    return out.shape == inputs.shape or stage == 0, inputs.grad is None or bool((inputs.grad == 1).all())


@pytest.mark.parametrize("axes", [Axes(tp=2), Axes(dp_shard=2)], ids=str)
@pytest.mark.parametrize(("layers", "stage"), [((0, 2, 2), 0), ((2, 0, 2), 1)], ids=["first", "middle"])
def test_a_part_without_layers(gang, axes, layers, stage):
    assert gang(2).run(empty_part, axes, layers, stage) == [(True, True)] * 2


def test_patches_are_not_divided_as_a_sequence():
    error = outcome([*words_of(IMAGES, Axes(tp=2)), "mesh.sequence_parallel=true"], "dit-digits")
    assert "mesh.sequence_parallel" in error.what and "mesh.sequence_parallel=false" in error.fix
    divided = load("dit-digits", words_of(IMAGES, Axes(tp=2))).with_keys({"mesh.sequence_parallel": True})
    with pytest.raises(LayoutError, match="stream is not sharded over tp"):
        verify(make_plan(divided))
