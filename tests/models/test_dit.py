"""The diffusion transformer: told everything it is given, cut where one likes, started as published."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from meshwright.models.build import build_model
from meshwright.models.dit import INIT_STD, DiT
from meshwright.models.shapes import Part
from meshwright.nn.linear import defer_weight_gradients, run_products
from tests.models.dits import PICTURES, VIDEOS, fill, make_batch

SPECS = pytest.mark.parametrize("spec", [PICTURES, VIDEOS], ids=["pictures", "videos"])


def parts(spec, sizes):
    """A model cut into parts of so many layers."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [fill(DiT(spec, Part(r, stage, len(sizes))).double()) for stage, r in enumerate(ranges)]


def run(chain, x, *told):
    for part in chain:
        x = part(x, *told)
    return x


@SPECS
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (0, 3, 0, 1), (4, 0)], ids=str)
def test_parts_compute_what_the_whole_does(spec, sizes):
    whole, chain = fill(DiT(spec).double()), parts(spec, sizes)
    batch = make_batch(spec, 3)
    expected, found = run([whole], *batch), run(chain, *batch)
    assert torch.equal(found, expected) and found.shape == batch[0].shape
    expected.square().sum().backward()
    found.square().sum().backward()
    sums = {}
    for part in chain:
        for name, parameter in part.whole_model_parameters():
            if parameter.grad is not None:  # none on a part without layers
                sums[name] = sums.get(name, 0) + parameter.grad
    whole_gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert sums.keys() == whole_gradients.keys()
    for name, gradient in whole_gradients.items():
        assert gradient.abs().max() > 0, name
        if name in spec.shared_names():
            torch.testing.assert_close(sums[name], gradient, rtol=1e-12, atol=1e-12 * gradient.abs().max().item())
        else:
            assert torch.equal(sums[name], gradient), name


@SPECS
def test_every_part_shares_the_embedders(spec):
    chain = parts(spec, (2, 0, 2))
    for part in chain:
        names = {name for name, _ in part.named_parameters() if name.split(".")[0].endswith("_embed")}
        assert names == set(spec.shared_names()) == set(part.local_copies())
        assert {p.key for p in part.shared_parameters()} == names
    assert DiT(spec).shared_parameters() == ()


@SPECS
def test_it_heeds_everything_it_is_told(spec):
    model = fill(DiT(spec).double())
    batch = make_batch(spec, 2)
    before = model(*batch)
    for number in range(4):
        changed = list(batch)
        changed[number] = batch[number].clone()
        changed[number][1] = batch[number][1] + 1 if number != 2 else (batch[2][1] + 1) % spec.num_classes
        after = model(*changed)
        assert torch.equal(after[0], before[0])  # the other sample
        heeds = number != 3 or spec.is_video
        assert torch.equal(after[1], before[1]) is not heeds


@SPECS
def test_every_patch_sees_all_and_knows_its_place(spec):
    model = fill(DiT(spec).double())
    x, *told = make_batch(spec, 1)
    before = model(x, *told)
    for corner in (0, -1):
        changed = x.clone()
        changed[..., corner, corner, corner] += 1
        assert (model(changed, *told) != before).all()
    same = model(torch.ones_like(x), *told)
    patches = model._grid.cut(same)[0]
    assert len(patches.unique(dim=0)) == spec.num_tokens()


@SPECS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(spec, dtype):
    exact = fill(DiT(spec).double())
    model = DiT(spec).to(dtype)
    model.load_state_dict(exact.state_dict())
    x, *told = make_batch(spec, 2)
    found, expected = model(x.to(dtype), *told), exact(x, *told)
    assert found.dtype == dtype
    tolerance = 50 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_initial_deviations():
    spec = replace(PICTURES, dim=64, ffn_dim=96, num_heads=8)
    model = DiT(spec)
    for name, parameter in model.named_parameters():
        std, zero_std = model.initial_std(name), DiT(replace(spec, zero_init=True)).initial_std(name)
        if name.endswith("bias"):
            assert std == zero_std == 0
        elif "modulation" in name or name.startswith("final"):
            assert (std, zero_std) == (INIT_STD, 0)
        elif "_embed" in name:
            assert std == zero_std == INIT_STD
        else:
            assert std == zero_std == pytest.approx(math.sqrt(2 / sum(parameter.shape))), name


def test_started_at_zero_every_block_is_the_identity():
    spec = replace(PICTURES, zero_init=True)
    model = fill(DiT(spec).double())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if model.initial_std(name) == 0:
                parameter.zero_()
    x, cond = torch.randn(2, 5, spec.dim).double(), torch.randn(2, spec.dim).double()
    assert all(torch.equal(block(x, cond), x) for block in model.blocks.values())
    assert (model(*make_batch(spec, 2)) == 0).all()


@SPECS
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_put_off_backward_is_the_backward(spec, recomputes):
    model, other = fill(DiT(spec).double()), fill(DiT(spec).double())
    batch = make_batch(spec, 2)
    model(*batch).square().sum().backward()
    for block in other.blocks.values():
        block.recomputes = recomputes
    store = defer_weight_gradients(other)
    store.defers = True
    other(*batch).square().sum().backward()
    run_products(store.take())
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_building_takes_no_memory():
    model = build_model(replace(PICTURES, dim=8192, num_layers=8), dtype=torch.bfloat16)
    assert isinstance(model, DiT) and all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
