"""The diffusion transformer: its block is its formula, it uses every condition, can be split, and starts as
published.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from meshwright.models.contract.model_facts import ZEROS, Normal, Part
from meshwright.models.dit.description import describe
from meshwright.models.dit.family import INIT_STD
from meshwright.models.dit.module import DiT, DiTBlock, FinalLayer
from meshwright.nn.linear import compute_deferred, defer_weight_gradients
from meshwright.nn.recompute import recompute
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from tests.models.dit.dits import IMAGES, VIDEOS, fill, make_batch, words_of
from tests.models.specs import initial
from tests.nn.blocks import context

SPECS = pytest.mark.parametrize("spec", [IMAGES, VIDEOS], ids=["images", "videos"])


def parts(spec, sizes):
    """A model cut into parts of so many layers."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [fill(DiT(spec, Part(r, stage, len(sizes))).double()) for stage, r in enumerate(ranges)]


def shared_names(spec):
    """Parameters of what every part has."""
    return {p.name for kind in describe(spec).every for p in kind.parameters}


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
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:  # none on a part without layers
                sums[name] = sums.get(name, 0) + parameter.grad
    whole_gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert sums.keys() == whole_gradients.keys()
    for name, gradient in whole_gradients.items():
        assert gradient.abs().max() > 0, name
        if name in shared_names(spec):
            torch.testing.assert_close(sums[name], gradient, rtol=1e-12, atol=1e-12 * gradient.abs().max().item())
        else:
            assert torch.equal(sums[name], gradient), name


@SPECS
def test_every_part_shares_the_embedders(spec):
    sizes = (2, 0, 2)
    plan = make_plan(load("dit-digits", words_of(spec, layers=sizes)))
    for number, part in enumerate(parts(spec, sizes)):
        names = {name for name, _ in part.named_parameters() if name.split(".")[0].endswith("_embed")}
        assert names == shared_names(spec) == set(StagePart(plan, number, part).shared_parameter_keys())
    assert {p.key for p in plan.shared_parameters()} == shared_names(spec)
    assert make_plan(load("dit-digits", words_of(spec))).shared_parameters() == ()


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
    patches = model._grid.patchify(same)[0]
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
    spec = replace(IMAGES, dim=64, ffn_dim=96, num_heads=8)
    model = DiT(spec)
    for name, parameter in model.named_parameters():
        fill, at_zero = initial(spec, name), initial(replace(spec, zero_init=True), name)
        if name.endswith("bias"):
            assert fill == at_zero == ZEROS
        elif "modulation" in name or name.startswith("final"):
            assert (fill, at_zero) == (Normal(INIT_STD), ZEROS)
        elif "_embed" in name:
            assert fill == at_zero == Normal(INIT_STD)
        else:
            assert fill == at_zero and fill.std == pytest.approx(math.sqrt(2 / sum(parameter.shape))), name


def test_started_at_zero_every_block_is_the_identity():
    spec = replace(IMAGES, zero_init=True)
    model = fill(DiT(spec).double())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if initial(spec, name) == ZEROS:
                parameter.zero_()
    x, cond = torch.randn(2, 5, spec.dim).double(), torch.randn(2, spec.dim).double()
    for block in model.blocks.values():
        assert torch.equal(block(x, cond, context(block.attention, 5, x.dtype, rotary=False)), x)
    assert (model(*make_batch(spec, 2)) == 0).all()


@SPECS
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_deferred_backward_is_the_backward(spec, recomputes):
    model, other = fill(DiT(spec).double()), fill(DiT(spec).double())
    batch = make_batch(spec, 2)
    model(*batch).square().sum().backward()
    for block in other.blocks.values() if recomputes else ():
        recompute(block)
    store = defer_weight_gradients(other)
    store.defers = True
    other(*batch).square().sum().backward()
    compute_deferred(store.take())
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


B, T, D, N, H = 2, 5, 12, 3, 4


def make(kind, *args, **sizes):
    torch.manual_seed(0)
    return kind(D, *args, **sizes).double(), torch.randn(B, T, D).double(), torch.randn(B, D).double()


def linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def tokens(block):
    return context(block.attention, T, torch.float64, rotary=False)


def modulated(x, shift, scale):
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return normed * (1 + scale[:, None]) + shift[:, None]


def modulation(layer, cond):
    return linear(layer, cond * cond.sigmoid()).split(D, dim=-1)


def reference(block, x, cond):
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation(block.modulation, cond)
    h, attention, heads = modulated(x, shift_a, scale_a), block.attention, []
    q, k, v = (linear(w, h) for w in (attention.wq, attention.wk, attention.wv))
    for n in range(N):
        own = slice(n * H, (n + 1) * H)
        scores = q[..., own] @ k[..., own].transpose(1, 2) / H**0.5
        heads.append(scores.softmax(-1) @ v[..., own])
    x = x + gate_a[:, None] * linear(attention.wo, torch.cat(heads, dim=-1))
    h = linear(block.mlp.fc1, modulated(x, shift_m, scale_m))
    gelu = h / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return x + gate_m[:, None] * linear(block.mlp.fc2, gelu)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_block_is_its_formula(recomputes):
    block, x, cond = make(DiTBlock, num_heads=N, head_dim=H, ffn_dim=20)
    if recomputes:
        recompute(block)
    x.requires_grad_()
    cond.requires_grad_()
    inputs = [x, cond, *block.parameters()]
    found, expected = block(x, cond, tokens(block)), reference(block, x, cond)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_bias_of_the_keys_would_change_nothing():
    block, x, cond = make(DiTBlock, num_heads=N, head_dim=H, ffn_dim=20)
    before = block(x, cond, tokens(block))
    block.attention.wk.bias = torch.nn.Parameter(torch.randn(N * H).double())
    torch.testing.assert_close(block(x, cond, tokens(block)), before, rtol=0, atol=1e-13)


def test_the_final_layer_is_its_formula():
    layer, x, cond = make(FinalLayer, patch_dim=7)
    shift, scale = modulation(layer.modulation, cond)
    torch.testing.assert_close(layer(x, cond), linear(layer.head, modulated(x, shift, scale)), rtol=0, atol=1e-13)
